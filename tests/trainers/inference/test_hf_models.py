"""Models that the embedded engine serves exactly as transformers does, and models that it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engine_conformance import prompt_of, rescore
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.hf import HFEngine

SMALL: dict[str, Any] = {
    "vocab_size": 900,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SERVED = {
    "llama": LlamaConfig(**SMALL),
    "llama, one key head": LlamaConfig(**{**SMALL, "num_key_value_heads": 1}),
    "llama, linear rope": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=900, n_embd=48, n_layer=3, n_head=4, n_positions=512, initializer_range=0.2),
    "mistral, wide window": MistralConfig(**SMALL, sliding_window=400),
    "qwen2 moe": Qwen2MoeConfig(
        **SMALL, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    ),
}
REFUSED = {
    "narrow sliding window": MistralConfig(**SMALL, sliding_window=100),
    "soft-capped attention": Gemma2Config(**SMALL, head_dim=12, sliding_window=600, attn_logit_softcapping=5.0),
    "no keys and values": MambaConfig(vocab_size=900, hidden_size=32, num_hidden_layers=2, state_size=4),
    "rope that depends on the longest": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "short context": LlamaConfig(**{**SMALL, "max_position_embeddings": 128}),
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def engine_for(model: Any) -> HFEngine:
    return HFEngine(ModelConfig(device="cpu"), EngineConfig(max_batch=4, max_context=256), seed=0, model_object=model)


@pytest.mark.parametrize("name", SERVED)
async def test_served_architectures(name: str) -> None:
    model = build(SERVED[name])
    engine = engine_for(model)
    await engine.start()
    try:

        async def episode(seed: int) -> None:
            history: list[int] = []
            for turn in range(3):
                history += prompt_of(3 + 5 * turn, seed=seed)
                got = await engine.generate(history, Sampling(4 + 9 * (seed % 3)), session=f"{seed}")
                np.testing.assert_allclose(got.logprobs, rescore(model, history, got.ids), atol=2e-4)
                history += got.ids.tolist()

        await asyncio.gather(*(episode(seed) for seed in range(7)))
        assert (await engine.stats()).reused_tokens > 0
        prompt = prompt_of(11)
        got = await engine.generate(prompt, Sampling(20, temperature=0), session="greedy")
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert got.ids.tolist() == expected[0, 11:].tolist()
    finally:
        await engine.close()


async def test_bfloat16() -> None:
    model = build(SERVED["llama"]).to(torch.bfloat16)
    engine = engine_for(model)
    await engine.start()
    try:
        prompt = prompt_of(20)
        got = await engine.generate(prompt, Sampling(30), session="a")
        np.testing.assert_allclose(got.logprobs, rescore(model, prompt, got.ids), atol=0.3)
    finally:
        await engine.close()


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_architectures(name: str) -> None:
    engine = engine_for(build(REFUSED[name]))
    with pytest.raises(EngineError, match=r"(use engine.kind=vllm|set engine.max_context)"):
        await engine.start()
    await engine.close()


async def test_models_that_do_not_load_are_engine_errors() -> None:
    engine = HFEngine(ModelConfig(path="./nothing-here"), EngineConfig(), seed=0)
    with pytest.raises(EngineError, match="does not exist"):
        await engine.start()
    with pytest.raises(EngineError, match="not started"):
        await engine.generate([5], Sampling(3), session="a")
    await engine.close()
