"""A tiny causal language model on disk, configurations that train it, and random batches for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentkit.config import RunConfig
from agentkit.trainers.batch import Batch, flatten
from agentkit.types import Group, Trajectory, Turn

VOCABULARY = 48


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 thousand parameters, Qwen3 architecture, random weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    directory = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def configure(tiny_model: Path) -> Callable[..., RunConfig]:
    """``configure(section={…})``: a run configuration over the tiny model."""

    def build(**sections: Any) -> RunConfig:
        sections["model"] = {"path": str(tiny_model), "device": "cpu"} | sections.get("model", {})
        sections["learner"] = {"lr": 1e-3} | sections.get("learner", {})
        if sections.get("critic") is not None:
            sections["critic"] = {"lr": 1e-3} | sections["critic"]
        return RunConfig.model_validate({"env": {"id": "Test-v0", "max_turns": 4}} | sections)

    return build


def random_groups(seed: int, groups: int = 4, members: int = 3, vocabulary: int = VOCABULARY) -> list[Group]:
    """Episodes of very different lengths, some truncated."""
    rng = np.random.default_rng(seed)

    def turn() -> Turn:
        prompt, action = rng.integers(1, 12), rng.integers(1, 8)
        return Turn(
            prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.int32),
            action_ids=rng.integers(0, vocabulary, action).astype(np.int32),
            action_logprobs=(-3.9 + 0.3 * rng.normal(size=action)).astype(np.float32),
            versions=((0, int(action)),),
            reward=float(rng.normal()),
        )

    def episode(group: int, member: int) -> Trajectory:
        truncated = rng.random() < 0.4
        final_ids = rng.integers(0, vocabulary, 3 if truncated else 0).astype(np.int32)
        turns = [turn() for _ in range(rng.integers(1, 5))]
        outcome = "truncated" if truncated else "terminated"
        return Trajectory(group, member, "test", 0, 0, turns, final_ids, outcome)

    return [Group(g, 0, 0, [episode(g, m) for m in range(members)]) for g in range(groups)]


@pytest.fixture(scope="session")
def make_groups() -> Callable[..., list[Group]]:
    return random_groups


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return lambda *args, **kwargs: flatten(random_groups(*args, **kwargs))
