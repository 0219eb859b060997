"""Results of training runs and evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentkit.types import Trajectory


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a training run.

    Success rates are shares between 0 and 1 of evaluation episodes, before and after reinforcement learning.
    """

    directory: Path
    """Run directory: configuration, metrics, episodes, checkpoints and the trained model in ``directory / "model"``."""
    steps: int
    """Finished training steps, including those of earlier sessions of a resumed run."""
    ending: Literal["finished", "interrupted"]
    """``finished``: all steps are done. ``interrupted``: the run was asked to stop; it can be resumed."""
    success_before: float | None
    """None if the run was stopped before the first evaluation."""
    success_after: float | None
    """None unless the run finished."""
    demonstrated_success: float | None
    """Success rate of the imitated episodes; None without imitation."""
    duration_s: float
    """Seconds since the run was started or resumed."""
    history: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    """Metrics of each training step, in order, with the keys of ``metrics.jsonl``; ``step`` counts from 1."""
    evaluations: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    """Metrics of each evaluation, in order: ``step``, ``eval/success``, ``eval/return_mean``, ``eval/turns_mean``, …"""

    @property
    def finished(self) -> bool:
        """Whether all training steps are done."""
        return self.ending == "finished"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last training step; empty before the first one."""
        return self.history[-1] if self.history else {}


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of an evaluation.

    The success rate and the means cover the episodes whose environment worked.
    """

    success: float
    """Share of episodes that succeeded, between 0 and 1."""
    return_mean: float
    turns_mean: float
    episodes: int
    """Number of episodes that the means cover."""
    failures: int
    """Number of episodes without a result, because their environment failed in every attempt."""
    policy_crashes: int
    """Number of episodes that count as failed: code of the policy crashed their sandbox twice without a known cause."""
    voided: Mapping[str, int]
    """Voided attempts by error class, including those that a later attempt replaced."""
    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """One for each seed, in order, including voided ones."""
    metrics: Mapping[str, float]
    """Means of the environment's own metrics (``task/…``)."""

    def success_interval(self, z: float = 1.96) -> tuple[float, float]:
        """Return the Wilson score interval of the success rate.

        Args:
            z: quantile of the normal distribution; 1.96 gives the 95 % interval.

        Returns:
            Lower and upper bound, between 0 and 1.
        """
        return wilson_interval(self.success, self.episodes, z)


def wilson_interval(rate: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927), which is accurate at rates near 0 and 1.

    Args:
        rate: observed share, between 0 and 1.
        count: number of observations, at least 1.
        z: quantile of the normal distribution; 1.96 gives the 95 % interval.

    Returns:
        Lower and upper bound, between 0 and 1.
    """
    centre = rate + z * z / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
