"""Learning signal of groups, computed from their episodes, and reasons for a batch without signal.

Invariant: for an estimator whose advantages follow from one group alone, ``carries_signal`` is true exactly if one of
the group's advantages is not zero (apart from rounding).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from agentkit.config import AlgorithmConfig
from agentkit.plugins import ADVANTAGE
from agentkit.trainers.algorithms.shaping import turn_rewards
from agentkit.types import Trajectory

_ROUNDING = 1e-9
"""Returns that differ by no more than this are equal."""


def carries_signal(members: Sequence[Trajectory], algorithm: AlgorithmConfig) -> bool:
    """Return whether the rewards give this group's tokens a non-zero advantage.

    - ``grpo``, ``dr_grpo``, ``rloo``, ``reinforce_pp_baseline``: the members' returns differ.
    - ``gigpo``: that, or the discounted returns of two turns that were taken in the same state differ.
    - ``reinforce``: any reward is not zero.
    - ``chunk_returns``: any return is not zero; ``raft``: any is above zero.
    - ``reinforce_pp``, ``batch_mean``, ``gae`` and ``bilevel_gae`` compare a group with the rest of the batch: always.
    - a plug-in: the members' returns differ if it declares a group baseline; otherwise always.

    A length penalty counts as a reward.
    """
    signal = ADVANTAGE.traits(algorithm.advantage).signal
    if signal == "always":
        return True
    rewards = [turn_rewards(member, algorithm) for member in members]
    if signal == "rewards":
        return any(reward != 0 for of_member in rewards for reward in of_member)
    returns = [sum(of_member) for of_member in rewards]
    if signal == "nonzero_return":
        return max(map(abs, returns)) > _ROUNDING
    if signal == "positive_return":
        return max(returns) > _ROUNDING
    if _differ(returns):
        return True
    return signal == "turns" and any(map(_differ, _returns_by_state(members, rewards, algorithm.gamma)))


def missing_signal(members: Sequence[Sequence[Trajectory]], algorithm: AlgorithmConfig) -> str | None:
    """Return why these groups carry no signal and a remedy, in one sentence; None if they carry signal.

    ``members`` are the episodes of each group of one training step. ``reinforce_pp`` learns nothing when all returns to
    go are equal, ``batch_mean`` when all returns are, and ``gae`` and ``bilevel_gae`` nothing useful when all rewards
    are 0.
    """
    if _teaches(members, algorithm):
        return None
    episodes = [member for group in members for member in group]
    rewards = [sum(turn_rewards(episode, algorithm)) for episode in episodes]
    if not any(turn.valid for episode in episodes for turn in episode.turns):
        return (
            "no answer was valid: the model does not keep to the format or names no known action; a model that follows "
            "instructions, imitation or a longer rollout.max_tokens may help"
        )
    if not _differ(rewards):
        if any(episode.success for episode in episodes):
            return f"all {len(episodes)} episodes earned {rewards[0]:g} and succeeded: harder tasks are needed"
        return (
            f"all {len(episodes)} episodes earned {rewards[0]:g} and none succeeded: easier tasks, imitation or a "
            "larger rollout.group_size may help"
        )
    if algorithm.advantage == "raft":
        return (
            f"no episode earned more than 0, and raft learns from positive returns alone (the best is {max(rewards):g}"
            "): easier tasks, imitation or another algorithm.advantage may help"
        )
    return (
        "the members of each group earned the same: the tasks are too easy or too hard for this policy, or its answers "
        "hardly vary; a larger rollout.group_size or rollout.dynamic_sampling may help"
    )


def _teaches(members: Sequence[Sequence[Trajectory]], algorithm: AlgorithmConfig) -> bool:
    rewards = [turn_rewards(member, algorithm) for group in members for member in group]
    if ADVANTAGE.traits(algorithm.advantage).needs_critic:
        return any(reward != 0 for of_episode in rewards for reward in of_episode)
    if algorithm.advantage == "batch_mean":
        return _differ(map(sum, rewards))
    if algorithm.advantage == "reinforce_pp":
        to_go = [sum(of_episode[k:]) for of_episode in rewards for k in range(len(of_episode))]
        return _differ(to_go) or (algorithm.gamma < 1 and to_go[0] != 0)
    return any(carries_signal(group, algorithm) for group in members)


def _returns_by_state(
    members: Sequence[Trajectory], rewards: Sequence[Sequence[float]], gamma: float
) -> Iterable[list[float]]:
    """For each state of a group, the discounted returns to go of the turns that were taken in it."""
    returns: dict[str, list[float]] = defaultdict(list)
    for member, of_member in zip(members, rewards, strict=True):
        to_go = 0.0
        turns = zip(reversed(member.states), reversed(member.turns), reversed(of_member), strict=True)
        for state, turn, reward in turns:
            to_go = reward + gamma * to_go
            if len(turn.action_ids):
                returns[state].append(to_go)
    return returns.values()


def _differ(values: Iterable[float]) -> bool:
    values = list(values)
    return max(values) - min(values) > _ROUNDING
