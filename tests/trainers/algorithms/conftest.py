"""Random episodes for the tests of algorithms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from agentkit.types import Group, Trajectory, Turn


def random_groups(seed: int) -> list[Group]:
    """One to four groups of one to four episodes of one to four turns, some truncated, rewards with ties."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(0, 50, rng.integers(low, high)).astype(np.int32)

    def turn() -> Turn:
        action_ids = ids(1, 5)
        return Turn(
            prompt_ids=ids(1, 5),
            action_ids=action_ids,
            action_logprobs=-rng.random(len(action_ids)).astype(np.float32),
            versions=((int(rng.integers(0, 3)), len(action_ids)),),
            reward=float(rng.choice([-0.1, 0.0, 0.5, 1.0])),
        )

    def episode(group_id: int, member: int) -> Trajectory:
        outcome = "truncated" if rng.random() < 0.5 else "terminated"
        turns = [turn() for _ in range(rng.integers(1, 5))]
        final_ids = ids(0, 4) if outcome == "truncated" else np.empty(0, np.int32)
        return Trajectory(group_id, member, "test", 0, 0, turns, final_ids, outcome)

    group_ids = rng.permutation(100)[: rng.integers(1, 5)]
    return [Group(int(g), 0, 0, [episode(int(g), m) for m in range(rng.integers(1, 5))]) for g in group_ids]


@pytest.fixture(scope="session")
def make_groups() -> Callable[[int], list[Group]]:
    return random_groups
