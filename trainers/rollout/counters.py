"""Rollout metrics of a training step.

Invariant: every episode that started is counted under exactly one ending; voided ones enter no mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms.signal import carries_signal
from agentkit.types import Group, Trajectory

ZERO_SIGNAL = "zero_signal"
"""Reason of groups that are refilled because they carry no signal."""
FILTERED = "filtered"
"""Reason of groups that are refilled because a plug-in refuses them."""

TASK = "task/"
"""Prefix of the names of an environment's metrics."""


def task_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each environment metric over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name.startswith(TASK):
                values.setdefault(name, []).append(value)
    return {name: sum(some) / len(some) for name, some in sorted(values.items())}


class RolloutCounters:
    """Collects between two snapshots."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.failures = 0
        self.retries = 0
        self.refills = 0
        self.refills_without_signal = 0
        self.policy_crashes = 0
        self._endings: Counter[str] = Counter()
        self._lengths: Counter[str] = Counter()
        self._groups: list[tuple[Group, int]] = []
        self._refilled: list[Trajectory] = []

    def ended(self, trajectory: Trajectory, ending: str, reason: str) -> None:
        """Count an episode that ended without being trained on."""
        self._endings[ending] += 1
        self._lengths[ending] += trajectory.num_action_tokens
        if reason:
            self._endings[f"{ending}/{reason}"] += 1
        if reason in (ZERO_SIGNAL, FILTERED):
            self._refilled.append(trajectory)

    def refilled(self, reason: str) -> None:
        """Count a group that is replaced by another one."""
        self.refills += 1
        self.refills_without_signal += reason == ZERO_SIGNAL

    def trained(self, group: Group, staleness: int) -> None:
        """Count a group that was consumed ``staleness`` versions after it started."""
        self._groups.append((group, staleness))

    def snapshot(self) -> dict[str, float]:
        """Return the metrics since the last snapshot.

        Means include episodes that were trained on and episodes that were refilled. Without the latter, a policy that
        always succeeds (or fails) on most tasks would appear to succeed half the time.
        """
        metrics = {
            "env/failures": float(self.failures),
            "env/retries": float(self.retries),
            "rollout/refills": float(self.refills),
            "rollout/policy_crashes": float(self.policy_crashes),
        }
        for ending in ("dropped", "cancelled", "voided"):
            metrics[f"gate/{ending}"] = float(self._endings[ending])
            if self._endings[ending]:
                metrics[f"gate/{ending}_tokens_mean"] = self._lengths[ending] / self._endings[ending]
        metrics |= {f"gate/{name}": float(count) for name, count in self._endings.items() if "/" in name}
        if self._groups:
            without_signal = self.refills_without_signal
            metrics |= _trained(self._groups, self._refilled, self.refills, without_signal, self._algorithm)
        self.__init__(self._algorithm)
        return metrics


def _trained(
    groups: Sequence[tuple[Group, int]],
    refilled: Sequence[Trajectory],
    refills: int,
    refills_without_signal: int,
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    episodes = [*(member for group, _ in groups for member in group.members), *refilled]
    turns = [turn for episode in episodes for turn in episode.turns]
    ages = [age for _, age in groups]
    count = len(episodes)
    flat = sum(not carries_signal(group.members, algorithm) for group, _ in groups) + refills_without_signal
    metrics = {
        "rollout/episodes": float(count),
        "rollout/return_mean": sum(e.reward for e in episodes) / count,
        "rollout/success": sum(e.success for e in episodes) / count,
        "rollout/turns_mean": sum(len(e.turns) for e in episodes) / count,
        "rollout/tokens_mean": sum(e.num_action_tokens for e in episodes) / count,
        "rollout/zero_signal_share": flat / (len(groups) + refills),
        "rollout/context_truncated": float(sum(e.reason == "context" for e in episodes)),
        "rollout/aborted_turns": sum(e.metrics.get("aborted_turns", 0.0) for e in episodes),
        "rollout/cut_answers": sum(t.finish_reason == "length" for t in turns) / len(turns) if turns else 0.0,
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(max(ages)),
    }
    for age in range(max(ages) + 1):
        metrics[f"staleness/hist_{age}"] = ages.count(age) / len(ages)
    return metrics | task_metrics(episodes)
