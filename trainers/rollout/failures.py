"""Consequences of failing environments: another attempt, the policy's failure, or the end of the run.

Invariant: an unexplained crash is retried once, independently of the retries, and then counts as the policy's failure.
It does not count towards the failure budget, because a policy must not be able to stop its run. The run stops if so
many environments fail that the remaining episodes would be a biased sample. The share is that of *recent* episodes, and
running episodes count as successful, because environments that fail at once finish before all others.
"""

from __future__ import annotations

from collections import Counter, deque

from agentkit.errors import EnvError, EnvFailureBudgetExceeded, UnexplainedCrash
from agentkit.types import Trajectory

_MIN_FAILURES = 20
"""Fewer failures never stop a run."""


class Attempts:
    """Counts the attempts of one episode: ``most`` with failing environments, and one more after an unexplained
    crash."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._crashed = False

    def again(self, error: EnvError) -> bool:
        """Record a failed attempt; return whether another one follows."""
        if isinstance(error, UnexplainedCrash) and not self._crashed:
            self._crashed = True
            return True
        self._left -= 1
        return self._left > 0

    def blame(self, error: EnvError, trajectory: Trajectory) -> bool:
        """Return whether the policy is responsible: the second unexplained crash of an episode, after an answer."""
        return self._crashed and isinstance(error, UnexplainedCrash) and bool(trajectory.turns)


def fail(trajectory: Trajectory, error: EnvError) -> None:
    """End an episode as the policy's failure: its last turn earns nothing."""
    trajectory.outcome, trajectory.success = "terminated", False
    trajectory.reason = f"{type(error).__name__}: {error}"
    trajectory.turns[-1].reward = 0.0


def void(trajectory: Trajectory, error: EnvError) -> None:
    """End an episode without a result."""
    trajectory.outcome, trajectory.success = "voided", False
    trajectory.reason = f"{type(error).__name__}: {error}"


class FailureBudget:
    """Counts the last ``window`` episodes that ended, by the kind of error."""

    def __init__(self, max_share: float, window: int) -> None:
        self._max_share = max_share
        self._recent: deque[EnvError | None] = deque(maxlen=window)
        self._failures = 0

    def record(self, error: EnvError | None, *, running: int) -> None:
        """Record an episode that ended, with the error of its environment, if any; ``running``: episodes still running.

        Raises ``EnvFailureBudgetExceeded`` with counts and an example of each kind.
        """
        if len(self._recent) == self._recent.maxlen:
            self._failures -= self._recent[0] is not None
        self._recent.append(error)
        if error is None:
            return
        self._failures += 1
        share = self._failures / (len(self._recent) + running)
        hopeless = self._failures == self._recent.maxlen
        if self._failures >= _MIN_FAILURES and (share > self._max_share or hopeless):
            raise EnvFailureBudgetExceeded(self._report())

    def _report(self) -> str:
        failed = [error for error in self._recent if error is not None]
        kinds = Counter(type(error).__name__ for error in failed)
        examples = {type(error).__name__: error for error in failed}
        lines = "; ".join(f"{count} x {kind}, the last: {examples[kind]}" for kind, count in kinds.most_common())
        return (
            f"{len(failed)} of the last {len(self._recent)} episodes had a failing environment, more than "
            f"rollout.max_failure_share={self._max_share:g} allows: {lines}. Try it alone with `agentkit env check`; "
            "raise env.step_timeout or env.reset_timeout if it is merely slow"
        )
