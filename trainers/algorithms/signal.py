"""Which groups teach an estimator something, told from their episodes before any batch is built.

Invariant: for an estimator whose advantages follow from one group alone, ``carries_signal`` is true exactly if one of
the group's advantages is not zero (apart from rounding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from agentkit.config import AlgorithmConfig
from agentkit.types import Trajectory

_ROUNDING = 1e-9
"""Returns that differ by no more than this are equal."""


def carries_signal(members: Sequence[Trajectory], algorithm: AlgorithmConfig) -> bool:
    """Whether the environment's rewards give this group's tokens an advantage.

    - ``grpo``, ``dr_grpo``, ``rloo``, ``reinforce_pp_baseline``: the members' returns differ.
    - ``gigpo``: that, or the discounted returns of two turns that were taken in the same state differ.
    - ``reinforce``: any reward is not zero.
    - ``reinforce_pp`` and ``gae`` compare a group with the rest of the batch: always.
    """
    if algorithm.advantage in ("reinforce_pp", "gae"):
        return True
    if algorithm.advantage == "reinforce":
        return any(turn.reward != 0 for member in members for turn in member.turns)
    if _differ(member.reward for member in members):
        return True
    return algorithm.advantage == "gigpo" and any(map(_differ, _returns_by_state(members, algorithm.gamma)))


def _returns_by_state(members: Sequence[Trajectory], gamma: float) -> Iterable[list[float]]:
    """For each state of a group, the discounted returns to go of the turns that were taken in it."""
    returns: dict[str, list[float]] = defaultdict(list)
    for member in members:
        to_go = 0.0
        for state, turn in zip(reversed(member.states), reversed(member.turns), strict=True):
            to_go = turn.reward + gamma * to_go
            if len(turn.action_ids):
                returns[state].append(to_go)
    return returns.values()


def _differ(values: Iterable[float]) -> bool:
    values = list(values)
    return max(values) - min(values) > _ROUNDING
