"""When something that failed may be tried again, and when it has failed too often.

Invariant: pure; the time is an argument and chance comes from the caller's generator, so that a failure can be
replayed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Backoff:
    """Growing waits with full jitter: many that failed together do not come back together."""

    base: float = 0.5
    """Longest wait after the first failure, in seconds."""
    factor: float = 2.0
    cap: float = 30.0
    """Longest wait of all, in seconds."""
    least: float = 0.0
    """Share of the longest wait that is always waited."""

    def ceiling(self, failures: int) -> float:
        """The longest that ``delay`` can be after so many failures in a row."""
        # A power beyond 64 changes nothing any more, but could overflow.
        return min(self.cap, self.base * self.factor ** min(max(failures - 1, 0), 64))

    def delay(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` failures in a row: from ``least`` of ``ceiling`` to all of it."""
        ceiling = self.ceiling(failures)
        return rng.uniform(self.least * ceiling, ceiling)


@dataclass
class Intensity:
    """So many restarts within a window are help; more are a crash loop."""

    limit: int = 3
    window: float = 60.0
    """Seconds."""
    _times: deque[float] = field(default_factory=deque)

    def allow(self, now: float) -> bool:
        """Whether one more restart may begin at ``now``; it is counted if so."""
        while self._times and now - self._times[0] >= self.window:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    @property
    def recent(self) -> int:
        """Restarts that counted when ``allow`` was last asked."""
        return len(self._times)


class Setbacks:
    """Failures in a row of one kind of work, and when it may be tried again."""

    def __init__(self, rng: random.Random, backoff: Backoff = Backoff()) -> None:
        self._rng, self._backoff = rng, backoff
        self.clear()

    def clear(self) -> None:
        """It has worked."""
        self.count = 0
        self.last = float("-inf")
        """When the last one that counts was noticed."""
        self.not_before = 0.0
        self.error: Exception | None = None
        """The last one."""

    def add(self, error: Exception, now: float, *, began: float | None = None) -> None:
        """Count a failure of work that began at ``began``. Work that began before the last failure was noticed says
        nothing new: several that fail together count once."""
        self.error = error
        if began is not None and began <= self.last:
            return
        self.count += 1
        self.last = now
        self.not_before = now + self._backoff.delay(self.count, self._rng)
