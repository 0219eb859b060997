"""The rollout loop with the real engine: recorded log-probs equal a second scoring under the same weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentkit.config import RunConfig
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models.load import load_policy, load_tokenizer
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import make_renderer
from agentkit.types import Trajectory


def scored_again(model: torch.nn.Module, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities of the action tokens in one pass over each context, and the action mask."""
    if trajectory.rerendered:
        alone = [scored_again(model, replace(trajectory, turns=[turn], rerendered=False)) for turn in trajectory.turns]
        return np.concatenate([scores for scores, _ in alone]), np.concatenate([mask for _, mask in alone])
    parts, mask = [], []
    for turn in trajectory.turns:
        parts += [turn.prompt_ids, turn.action_ids]
        mask += [False] * len(turn.prompt_ids) + [True] * len(turn.action_ids)
    ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].float()
    picked = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
    return picked.numpy()[np.asarray(mask[1:])], np.asarray(mask)


@pytest.mark.parametrize("history", ["append", "rerender", "window"])
async def test_records_of_frozen_lake_are_exact(history: str) -> None:
    config = RunConfig.model_validate(
        {
            "env": {"id": "FrozenLake-v1", "max_turns": 4},
            "rollout": {"groups": 2, "group_size": 4, "max_tokens": 8},
            "engine": {"max_batch": 8},
            "model": {"history": history} | ({"window": 1} if history == "window" else {}),
        }
    )
    engine = HFEngine(config.model, config.engine, seed=config.seed)
    await engine.start()
    ends: list[str] = []
    loop = RolloutLoop(
        config,
        engine,
        make_renderer(config.model, load_tokenizer(config.model.path), 4),
        ActionParser("tagged"),
        on_episode=lambda trajectory, ending, reason: ends.append(ending),
    )
    try:
        await loop.start()
        batch = await loop.next_batch()
    finally:
        await loop.close()
        await engine.close()
    model = load_policy(config.model, config.seed).eval()
    for trajectory in (member for group in batch for member in group.members):
        assert len(trajectory.turns) == 4
        assert trajectory.rerendered == (history != "append")
        again, mask = scored_again(model, trajectory)
        recorded = np.concatenate([turn.action_logprobs for turn in trajectory.turns])
        np.testing.assert_allclose(again, recorded, atol=1e-4)
        assert int(mask.sum()) == trajectory.num_action_tokens
    assert ends.count("trained") == 8
