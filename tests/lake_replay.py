"""Plays the answers of an episode of FrozenLake again, for the tests of other systems."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentkit.envs.frozen_lake import FrozenLake


def assert_replays(
    shown: Sequence[str], answers: Sequence[str], env: FrozenLake, seed: int, turns: int
) -> tuple[float, dict[str, float]]:
    """Give the answers to ``env``; return the reward, with -0.1 for an invalid answer, and the metrics.

    The policy must have been shown each observation, and the episode must have ended where it ends here.
    """
    observation, _ = env.reset(seed=seed)
    total, success, invalid = 0.0, False, 0
    for turn, (text, answer) in enumerate(zip(shown, answers, strict=True)):
        assert observation in text
        ended = False
        if action := re.fullmatch(r"<answer>(\w+)</answer>", answer):
            observation, reward, ended, _, info = env.step(action[1])
            total, success = total + reward, info["success"]
        else:
            total, invalid = total - 0.1, invalid + 1
        assert (ended or turn + 1 == turns) == (turn + 1 == len(answers))
    return total, {"success": float(success), "turns": float(len(answers)), "invalid_turns": float(invalid)}
