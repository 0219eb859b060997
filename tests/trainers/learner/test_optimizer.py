"""Assignment of parameters to optimisers, and the size and direction of Muon's update."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, LlamaConfig, Qwen2Config

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.critic import ValueModel
from agentkit.trainers.learner.optimizer import MuonAdamW, apply_step, build_optimizer


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def test_muon_takes_the_matrices_inside_the_model_and_nothing_else(model):
    optimizer = build_optimizer(model, LearnerConfig(optimizer="muon"))
    assert isinstance(optimizer, MuonAdamW)
    taken = [{id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts]
    names = [{name for name, p in model.named_parameters() if id(p) in part} for part in taken]
    assert names[0] == {name for name, _ in model.named_parameters() if "_proj" in name}
    assert names[0] | names[1] == {name for name, _ in model.named_parameters()}
    assert not names[0] & names[1]
    assert "model.embed_tokens.weight" in names[1]


GPT2 = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)
GPTJ = GPTJConfig(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
LLAMA = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
QWEN = Qwen2Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PROJECTIONS = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
PROJECTIONS |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
INSIDE = {
    "gpt2": {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    "gptj": {"attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"},
    "llama": PROJECTIONS,
    "qwen2": PROJECTIONS,
}


@pytest.mark.parametrize("trunk", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", [GPT2, GPTJ, LLAMA, QWEN], ids=lambda config: config.model_type)
def test_no_embedding_and_no_head_goes_to_muon(config, tied, trunk):
    config = copy.deepcopy(config)
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config)
    if trunk:
        model = ValueModel(model.base_model, 16, torch.float32)
    optimizer = build_optimizer(model, LearnerConfig(optimizer="muon"))
    assert isinstance(optimizer, MuonAdamW)
    taken = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in taken}
    expected = INSIDE[config.model_type]
    assert {".".join(name.split(".")[-3:-1]) for name in names} == expected
    assert all(name.endswith(".weight") for name in names)
    assert len(names) == len(expected)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


def test_muon_takes_adapters_but_not_those_of_the_head():
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_config(LLAMA),
        peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head", "embed_tokens"]),
    )
    optimizer = build_optimizer(adapted, LearnerConfig(optimizer="muon"))
    assert isinstance(optimizer, MuonAdamW)
    taken = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    names = {name for name, p in adapted.named_parameters() if id(p) in taken}
    assert len(names) == 2  # both matrices of the one layer
    assert all("q_proj.lora_" in name for name in names)


def test_a_muon_step_moves_along_the_gradients_singular_vectors_as_far_as_adamw_would(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(40).reshape(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer = build_optimizer(model, LearnerConfig(optimizer="muon"))
    apply_step(optimizer, loss=1.0, lr=1e-2, grad_clip=1e9, what="test's")
    for name, p in model.named_parameters():
        if "_proj" not in name:
            continue
        update = before[name] - p.detach()
        u, s, v = torch.linalg.svd(gradients[name], full_matrices=False)
        strong = (
            s > 0.05 * s[0]
        )  # five Newton-Schulz iterations in bfloat16 lift weaker directions only part of the way
        along = torch.diagonal(u.T @ update @ v.T)[strong] / (1e-2 * 0.2 * max(p.shape) ** 0.5)
        assert ((along > 0.5) & (along < 1.3)).all(), name


def test_adamw_equals_torchs(model):
    assert type(build_optimizer(model, LearnerConfig())) is torch.optim.AdamW
