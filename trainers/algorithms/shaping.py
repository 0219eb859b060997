"""DAPO's soft penalty of overlong episodes, a part of the reward (arXiv:2503.14476, eq. 13).

Invariant: the penalty depends only on the number of action tokens of the episode, and is added to its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentkit.config import AlgorithmConfig
from agentkit.trainers.batch import Batch
from agentkit.types import Trajectory


def length_penalty(action_tokens: Sequence[int] | NDArray[np.int64], config: AlgorithmConfig) -> NDArray[np.float64]:
    """Penalty of episodes with ``n`` action tokens, at most 0; without the settings it is 0.

    ``overlong_penalty`` times: 0 if ``n <= overlong_max - overlong_buffer``, then ``(overlong_max - overlong_buffer -
    n) / overlong_buffer``, and -1 from ``n = overlong_max`` on.
    """
    lengths = np.asarray(action_tokens, np.float64)
    if config.overlong_max is None or config.overlong_buffer is None:
        return np.zeros_like(lengths)
    share = (config.overlong_max - config.overlong_buffer - lengths) / config.overlong_buffer
    return config.overlong_penalty * np.clip(share, -1.0, 0.0)


def with_length_penalty(batch: Batch, config: AlgorithmConfig) -> Batch:
    """Add each episode's penalty to the reward of its last action token."""
    if config.overlong_max is None:
        return batch
    actions = np.flatnonzero(batch.mask)
    sequences = batch.sequence_ids[actions]
    last = actions[np.diff(sequences, append=-1) != 0]
    rewards = batch.rewards.copy()
    rewards[last] += length_penalty(batch.action_counts, config)[batch.sequence_ids[last]]
    return replace(batch, rewards=rewards)


def turn_rewards(episode: Trajectory, config: AlgorithmConfig) -> list[float]:
    """Rewards of the turns of an episode, with the penalty added to the last one that has an action token."""
    rewards = [turn.reward for turn in episode.turns]
    acting = [k for k, turn in enumerate(episode.turns) if len(turn.action_ids)]
    if acting:
        rewards[acting[-1]] += float(length_penalty([episode.num_action_tokens], config)[0])
    return rewards
