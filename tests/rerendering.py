"""Episodes whose history is rendered again, made from appended ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agentkit.types import Group, Trajectory


def rerendered(groups: Sequence[Group]) -> list[Group]:
    """Return the same episodes with the whole prefix as each turn's prompt, so the model reads the same before each
    action and values are those of the same states."""
    return [replace(group, members=[_rerendered(episode) for episode in group.members]) for group in groups]


def _rerendered(episode: Trajectory) -> Trajectory:
    before = np.empty(0, np.int32)
    turns = []
    for turn in episode.turns:
        before = np.concatenate([before, turn.prompt_ids])
        turns.append(replace(turn, prompt_ids=before))
        before = np.concatenate([before, turn.action_ids])
    final_ids = np.concatenate([before, episode.final_ids]) if len(episode.final_ids) else episode.final_ids
    return replace(episode, turns=turns, final_ids=final_ids, rerendered=True)
