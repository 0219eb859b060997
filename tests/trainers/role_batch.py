"""The smallest batch with a gradient, for tests of roles."""

from __future__ import annotations

import numpy as np

from agentkit.trainers.batch import Batch, flatten
from agentkit.types import Group, Trajectory, Turn


def batch() -> Batch:
    def member(index: int) -> Trajectory:
        turn = Turn(
            prompt_ids=np.array([5, 6], np.int32),
            action_ids=np.array([7, 8 + index], np.int32),
            action_logprobs=np.full(2, -6.0, np.float32),
            versions=((0, 2),),
            reward=float(index),
        )
        return Trajectory(0, index, "test", 0, 0, [turn])

    return flatten([Group(0, 0, 0, [member(0), member(1)])])
