"""Decide when failed work may be retried, and when it has failed too often.

Invariant: pure; the time is an argument and random numbers come from the caller's generator, so that a failure can be
reproduced.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Backoff:
    """Growing delays with full jitter, so that callers that failed together do not retry together."""

    base: float = 0.5
    """Longest delay after the first failure, in seconds."""
    factor: float = 2.0
    cap: float = 30.0
    """Longest delay after any number of failures, in seconds."""
    least: float = 0.0
    """Share of the longest delay that is always waited."""

    def ceiling(self, failures: int) -> float:
        """Return the longest delay in seconds after so many failures in a row."""
        # A power beyond 64 changes nothing, but could overflow.
        return min(self.cap, self.base * self.factor ** min(max(failures - 1, 0), 64))

    def delay(self, failures: int, rng: random.Random) -> float:
        """Return the seconds to wait after ``failures`` failures in a row."""
        ceiling = self.ceiling(failures)
        return rng.uniform(self.least * ceiling, ceiling)


@dataclass
class RestartLimit:
    """Number of restarts allowed within a sliding window; more are a crash loop."""

    limit: int = 3
    window: float = 60.0
    """Seconds."""
    _times: deque[float] = field(default_factory=deque)

    def allow(self, now: float) -> bool:
        """Return whether one more restart may begin at ``now``, and count it if so."""
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    def clear(self) -> None:
        """Forget all restarts."""
        self._times.clear()


class FailureStreak:
    """Failures in a row of one kind of work, and when it may be retried."""

    def __init__(self, rng: random.Random, backoff: Backoff = Backoff()) -> None:
        self._rng, self._backoff = rng, backoff
        self.clear()

    def clear(self) -> None:
        """Record a success."""
        self.count = 0
        self.last = float("-inf")
        """Time of the last failure that was counted."""
        self.not_before = 0.0
        """Time of the next attempt."""
        self.error: Exception | None = None
        """The last failure."""

    def add(self, error: Exception, now: float, *, began: float | None = None) -> None:
        """Count a failure of work that began at ``began``.

        Work that began before the last counted failure is ignored: concurrent failures count once.
        """
        self.error = error
        if began is not None and began <= self.last:
            return
        self.count += 1
        self.last = now
        self.not_before = now + self._backoff.delay(self.count, self._rng)
