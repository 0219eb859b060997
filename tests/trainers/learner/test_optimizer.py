"""Which optimiser takes which parameter, and the size and direction of Muon's update by singular values."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.optimizer import MuonAdamW, apply_step, build_optimizer


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def test_muon_takes_the_matrices_inside_the_model_and_nothing_else(model):
    optimizer = build_optimizer(model.named_parameters(), LearnerConfig(optimizer="muon"))
    assert isinstance(optimizer, MuonAdamW)
    taken = [{id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts]
    names = [{name for name, p in model.named_parameters() if id(p) in part} for part in taken]
    assert names[0] == {name for name, _ in model.named_parameters() if "_proj" in name}
    assert names[0] | names[1] == {name for name, _ in model.named_parameters()}
    assert not names[0] & names[1]
    assert "model.embed_tokens.weight" in names[1]


def test_a_muon_step_moves_along_the_gradients_singular_vectors_as_far_as_adamw_would(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(40).reshape(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer = build_optimizer(model.named_parameters(), LearnerConfig(optimizer="muon"))
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


def test_adamw_alone_is_torchs_own(model):
    assert type(build_optimizer(model.named_parameters(), LearnerConfig())) is torch.optim.AdamW
