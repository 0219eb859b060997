"""Circuit breaker: while an engine keeps failing, calls to it fail at once, until trial calls succeed.

Invariant: only the engine is judged, not its sandboxes. No call passes while the breaker is open, and at most
``half_open`` are under way while it is half open. The result of a call that began before a change of state is ignored,
and so is that of a cancelled call. Durations are compared with the median of the same operation; a lasting slowdown
becomes normal once it fills half of the remembered durations.
"""

from __future__ import annotations

import asyncio
import statistics
import time as _time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from agentkit.errors import AgentkitError, BreakerOpen, QuotaExceeded, SandboxLost, StartTimeout

BreakerState = Literal["closed", "open", "half_open"]

_MEMORY = 100
"""Number of durations of each operation that the median is taken of."""
_ENGINE_PHASES = frozenset({"create", "start", "restart"})
"""Phases of a start in which the engine works, not the sandbox."""


def is_engine_fault(error: BaseException) -> bool:
    """Return whether an error is a fault of the engine.

    Errors of the caller (a missing image, an unsupported feature), the end of a sandbox, failed start-up commands of a
    sandbox, cancellations, and the refusal of an engine that is full are not.
    """
    if isinstance(error, QuotaExceeded):
        return False
    if isinstance(error, StartTimeout):
        return error.details.get("phase") in _ENGINE_PHASES
    if isinstance(error, SandboxLost):
        return error.details.get("reason") == "engine_down"
    if isinstance(error, AgentkitError):
        return error.retryable
    return isinstance(error, Exception)


class Breaker:
    """Circuit breaker of one engine. Use ``with breaker.call("create"): ...`` around each call to the engine.

    Args:
        name: name of the engine in error messages.
        window: number of calls whose results are remembered.
        min_calls: number of calls before the breaker can open, and before durations are judged.
        failure: share of bad calls in the window at which the breaker opens.
        slow: a successful call is bad if it takes more than this many times the median of its operation ...
        slow_floor: ... and more than this, in seconds.
        open: seconds until trial calls pass.
        half_open: number of trial calls that must succeed.
        time: clock, in seconds.

    Example:
        Share one breaker between two pools of one engine:

        ```python
        breaker = Breaker("docker")
        pools = [SandboxPool(small, breaker=breaker), SandboxPool(large, breaker=breaker)]
        ```
    """

    def __init__(
        self,
        name: str = "engine",
        *,
        window: int = 20,
        min_calls: int = 10,
        failure: float = 0.5,
        slow: float = 5.0,
        slow_floor: float = 1.0,
        open: float = 15.0,
        half_open: int = 2,
        time: Callable[[], float] = _time.monotonic,
    ) -> None:
        self.name = name
        self._min_calls, self._failure, self._half_open = min_calls, failure, half_open
        self._slow, self._slow_floor, self._open_for = slow, slow_floor, open
        self._time = time
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._durations: dict[str, deque[float]] = {}
        self._state: BreakerState = "closed"
        self._epoch = 0
        self._opened_at = 0.0
        self._slow_at = float("-inf")
        """Time of the last slow call that was counted."""
        self.cause = ""
        """Cause of the last change of state."""
        self._trials = 0
        self._passed = 0
        self.opened = 0
        """Number of times that the breaker opened."""

    @property
    def state(self) -> BreakerState:
        if self._state == "open" and self._time() >= self._opened_at + self._open_for:
            self._change("half_open", f"{self._open_for:g} s have passed")
        return self._state

    @property
    def retry_after(self) -> float:
        """Seconds until a call may pass; 0 unless the breaker is open."""
        return max(0.0, self._opened_at + self._open_for - self._time()) if self.state == "open" else 0.0

    @property
    def room(self) -> int | None:
        """Number of calls that may pass now; None means any number."""
        state = self.state
        if state == "closed":
            return None
        return self._half_open - self._trials if state == "half_open" else 0

    def error(self) -> BreakerOpen:
        """Return the error for a call that may not pass."""
        wait = self.retry_after
        return BreakerOpen(
            f"{self.name} failed too often ({self.cause}); it is not called for another {wait:.1f} s. Check the "
            "engine, or wait",
            retry_after=wait,
            cause=self.cause,
        )

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Run the body and record its result.

        Args:
            operation: name of the operation; durations are compared within one operation.

        Raises:
            BreakerOpen: the breaker is open, or all trial calls are under way; the body did not run.
        """
        room = self.room
        if room is not None and room <= 0:
            raise self.error()
        epoch, start = self._epoch, self._time()
        trial = self._state == "half_open"
        self._trials += trial
        verdict: bool | None = None
        why = ""
        try:
            yield
            verdict, why = self._verdict(operation, start)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if is_engine_fault(error):
                verdict, why = False, f"{operation}: {type(error).__name__}: {error}"
            elif isinstance(error, Exception):
                verdict = True  # the engine answered that the request was wrong
            raise
        finally:
            if epoch == self._epoch:
                self._trials -= trial
                if verdict is not None:
                    self._record(verdict, why)

    def trip(self, cause: str) -> None:
        """Open the breaker now.

        Args:
            cause: cause for error messages.
        """
        if self._state != "open":
            self.opened += 1
        self._opened_at = self._time()
        self._change("open", cause)

    def _verdict(self, operation: str, start: float) -> tuple[bool | None, str]:
        """Return whether a successful call was good and why not; None if it adds nothing to an earlier bad call.

        Calls that were slow at the same time count once: one host of many may have delayed them all.
        """
        duration = self._time() - start
        known = self._durations.setdefault(operation, deque(maxlen=_MEMORY))
        # A trial call only shows whether the engine is back. Otherwise a lasting slowdown would never end.
        judged = len(known) >= self._min_calls and self._state == "closed"
        median = statistics.median(known) if judged else None
        known.append(duration)
        if median is None or duration <= max(self._slow * median, self._slow_floor):
            return True, ""
        if start < self._slow_at:
            return None, ""
        self._slow_at = self._time()
        return False, f"{operation} took {duration:.2f} s, usually {median:.2f} s"

    def _record(self, good: bool, why: str) -> None:
        if self._state == "half_open":
            if not good:
                self.trip(why)
                return
            self._passed += 1
            if self._passed >= self._half_open:
                self._change("closed", f"{self._passed} trial calls succeeded")
            return
        self._outcomes.append(good)
        bad = self._outcomes.count(False)
        if not good and len(self._outcomes) >= self._min_calls and bad >= self._failure * len(self._outcomes):
            self.trip(f"{bad} of {len(self._outcomes)} calls failed, the last with {why}")

    def _change(self, state: BreakerState, cause: str) -> None:
        self._state, self.cause = state, cause
        self._epoch += 1
        self._trials = self._passed = 0
        self._outcomes.clear()
