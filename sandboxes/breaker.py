"""A circuit breaker: calls to an engine that keeps failing fail at once, until a few trial calls succeed.

Invariant: only the engine is judged; what becomes of the sandboxes that it made says nothing about it. While it is
open nothing passes; while it is half open at most ``half_open`` calls are under way. A call that was let in before a
change of state says nothing about the state after it, and a call that was cancelled says nothing at all. Slowness is
judged against the median of the same operation, so that a slow kind of call never counts against a quick one; a lasting
slowdown becomes the new normal once it fills half of the memory.
"""

from __future__ import annotations

import asyncio
import statistics
import time as _time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from agentkit.errors import AgentkitError, BreakerOpen, SandboxLost, StartTimeout

BreakerState = Literal["closed", "open", "half_open"]

_MEMORY = 100
"""Durations of each operation from which its median is taken."""
_ENGINE_PHASES = frozenset({"create", "start", "restart"})
"""Phases of a start in which the engine works, not the sandbox."""


def default_is_fault(error: BaseException) -> bool:
    """Whether an error speaks against the engine. What the caller asked wrongly (a missing image, an unsupported
    feature) does not, nor the end of a sandbox or of its own start-up commands, nor a cancellation."""
    if isinstance(error, StartTimeout):
        return error.details.get("phase") in _ENGINE_PHASES
    if isinstance(error, SandboxLost):
        return error.details.get("reason") == "engine_down"
    if isinstance(error, AgentkitError):
        return error.retryable
    return isinstance(error, Exception)


class Breaker:
    """``with breaker.call("create"): …`` around every call to the engine that new work depends on."""

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
        is_fault: Callable[[BaseException], bool] = default_is_fault,
        on_change: Callable[[BreakerState, str], None] | None = None,
    ) -> None:
        """``failure`` is the share of bad calls among the last ``window`` at which it opens, ``slow`` the multiple of
        the median from which a success is bad too (never below ``slow_floor`` seconds), ``open`` the seconds until
        ``half_open`` trial calls are let through."""
        self.name = name
        self._min_calls, self._failure, self._half_open = min_calls, failure, half_open
        self._slow, self._slow_floor, self._open_for = slow, slow_floor, open
        self._time, self.is_fault, self._on_change = time, is_fault, on_change
        self._outcomes: deque[bool] = deque(maxlen=window)
        self._durations: dict[str, deque[float]] = {}
        self._state: BreakerState = "closed"
        self._epoch = 0
        self._opened_at = 0.0
        self._cause = ""
        self._trials = 0
        self._passed = 0
        self.opened = 0
        """How often it opened."""

    @property
    def state(self) -> BreakerState:
        if self._state == "open" and self._time() >= self._opened_at + self._open_for:
            self._change("half_open", f"{self._open_for:g} s have passed")
        return self._state

    @property
    def cause(self) -> str:
        """Why it changed its state last."""
        return self._cause

    @property
    def retry_after(self) -> float:
        """Seconds until a call may pass; 0 unless it is open."""
        return max(0.0, self._opened_at + self._open_for - self._time()) if self.state == "open" else 0.0

    @property
    def room(self) -> int | None:
        """How many calls would be let in now; None is any number."""
        state = self.state
        if state == "closed":
            return None
        return self._half_open - self._trials if state == "half_open" else 0

    def error(self) -> BreakerOpen:
        """The error that a call gets now."""
        wait = self.retry_after
        return BreakerOpen(
            f"{self.name} failed too often ({self._cause}); no call is made for another {wait:.1f} s. Look at the "
            "engine, or wait",
            retry_after=wait,
            cause=self._cause,
        )

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Let the body pass and learn from how it ends. Raises ``BreakerOpen`` instead of running it."""
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
            verdict, why = self._verdict(operation, self._time() - start)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self.is_fault(error):
                verdict, why = False, f"{operation}: {type(error).__name__}: {error}"
            elif isinstance(error, Exception):
                verdict = True  # the engine answered; what it was asked was wrong
            raise
        finally:
            if epoch == self._epoch:
                self._trials -= trial
                if verdict is not None:
                    self._record(verdict, why)

    def trip(self, cause: str) -> None:
        """Open now, for ``cause``."""
        if self._state != "open":
            self.opened += 1
        self._opened_at = self._time()
        self._change("open", cause)

    def _verdict(self, operation: str, duration: float) -> tuple[bool, str]:
        known = self._durations.setdefault(operation, deque(maxlen=_MEMORY))
        # A trial call is asked for one thing: whether the engine is back. Otherwise a lasting slowdown could never end.
        judged = len(known) >= self._min_calls and self._state == "closed"
        median = statistics.median(known) if judged else None
        known.append(duration)
        if median is None or duration <= max(self._slow * median, self._slow_floor):
            return True, ""
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
        self._state, self._cause = state, cause
        self._epoch += 1
        self._trials = self._passed = 0
        self._outcomes.clear()
        if self._on_change is not None:
            self._on_change(state, cause)
