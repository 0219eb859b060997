"""Hedged calls: if a call takes longer than nearly all before it, start a second one and use the first success.

Invariant: only for operations that may run twice (creating, resetting, reading, verifying, and stepping a copy of a
deterministic environment), never for commands with effects. There is at most one extra call each, and extra calls for
at most ``budget`` of all calls, so that an overloaded engine is not loaded further. The result of the slower call is
discarded, and no call is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from agentkit.errors import ConfigError
from agentkit.sandboxes.arguments import check_choice, check_not_negative, check_positive
from agentkit.sandboxes.recovery.record import RecoveryLog
from agentkit.sandboxes.tasks import loop_time, tracked

T = TypeVar("T")
Operation = Literal["create", "reset", "step", "read", "verify"]
Quantile = Literal["p50", "p90", "p95", "p99"]
_OPERATIONS: frozenset[str] = frozenset(get_args(Operation))


@dataclass
class HedgeCounts:
    """Number of calls of a ``Hedge``."""

    calls: int = 0
    hedged: int = 0
    """Calls for which a second one was started."""
    won: int = 0
    """Calls whose second one succeeded first."""


@dataclass
class _Attempt(Generic[T]):
    task: asyncio.Future[T]
    began: float


class Hedge:
    """Hedges slow calls.

    Args:
        after: when the second call starts: a quantile of past durations of the operation (used once 20 are known), or
            seconds.
        budget: largest share of calls that are hedged, above 0 and at most 1.
        least: smallest delay in seconds, where a second call itself takes time.
        log: where hedged calls are counted as well.

    Attributes:
        counts: number of calls, hedged calls, and calls that the second one won.

    Raises:
        ConfigError: ``after`` or ``budget`` is out of range.
    """

    def __init__(
        self,
        after: float | Quantile = "p95",
        budget: float = 0.05,
        *,
        least: float = 0.0,
        log: RecoveryLog | None = None,
    ) -> None:
        if isinstance(after, str):
            check_choice("after", after, Quantile)
        else:
            check_not_negative(after=after)
        check_positive(budget=budget)
        if budget > 1:
            raise ConfigError(f"budget={budget} of a hedge must be above 0 and at most 1")
        self._after = after
        self._budget, self._least = budget, least
        self._log = log or RecoveryLog()
        self._credit = 0.0
        self._durations: dict[str, deque[float]] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self.counts = HedgeCounts()

    def delay(self, operation: str) -> float | None:
        """Return the seconds after which a second call starts; None while too few durations are known.

        Args:
            operation: the operation of the call.
        """
        if not isinstance(self._after, str):
            return max(self._least, self._after)
        known = sorted(self._durations.get(operation, ()))
        # Fewer durations give no reliable quantile. The factor avoids hedges of calls that are all equally fast.
        if len(known) < 20:
            return None
        return max(self._least, 1.1 * known[int(len(known) * int(self._after[1:]) / 100)])

    async def run(
        self,
        operation: Operation,
        attempt: Callable[[], Awaitable[T]],
        *,
        discard: Callable[[T], Awaitable[None]] | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> T:
        """Return the result of ``attempt()``, or of a second one if that succeeds first.

        Args:
            operation: what is done; durations are compared within one operation.
            attempt: starts the call.
            discard: called with the result of the slower call.
            may: whether there is capacity for a second call.

        Raises:
            ConfigError: the operation may not run twice.
            Exception: the error of the first call, if all fail.
        """
        if operation not in _OPERATIONS:
            raise ConfigError(f"{operation!r} cannot be hedged; only {', '.join(sorted(_OPERATIONS))} may run twice")
        self.counts.calls += 1
        self._credit = min(self._credit + self._budget, 1.0)
        attempts = [_start(attempt)]
        try:
            await asyncio.wait({attempts[0].task}, timeout=self.delay(operation))
            if not attempts[0].task.done() and self._credit >= 1.0 - 1e-9 and may():
                self._credit = 0.0
                self.counts.hedged += 1
                self._log.hedged[operation] += 1
                attempts.append(_start(attempt))
            winner = await _first_success(attempts)
        except BaseException:
            # If the caller is cancelled again, the cleaning continues and ``close`` waits for it.
            await asyncio.shield(self._clean(attempts, discard))
            raise
        if attempts.index(winner) == 1:
            self.counts.won += 1
            self._log.won[operation] += 1
        # The slower call would have taken at least this long. Without it the quantile would shrink further and further.
        now = loop_time()
        self._durations.setdefault(operation, deque(maxlen=200)).extend(now - attempt.began for attempt in attempts)
        if len(attempts) > 1:
            self._clean([attempt for attempt in attempts if attempt is not winner], discard)
        return winner.task.result()

    async def close(self) -> None:
        """Wait until all slower calls have ended and their results are discarded."""
        while self._cleaning:
            await asyncio.wait(self._cleaning)

    def _clean(self, attempts: list[_Attempt[T]], discard: Callable[[T], Awaitable[None]] | None) -> asyncio.Task[None]:
        return tracked(_discard(attempts, discard), self._cleaning)


def _start(attempt: Callable[[], Awaitable[T]]) -> _Attempt[T]:
    return _Attempt(asyncio.ensure_future(attempt()), loop_time())


async def _first_success(attempts: list[_Attempt[T]]) -> _Attempt[T]:
    waiting = list(attempts)
    while True:
        await asyncio.wait({attempt.task for attempt in waiting}, return_when=asyncio.FIRST_COMPLETED)
        for attempt in [attempt for attempt in waiting if attempt.task.done()]:
            waiting.remove(attempt)
            if not attempt.task.cancelled() and attempt.task.exception() is None:
                return attempt
        if not waiting:
            attempts[0].task.result()
            raise AssertionError("a failed attempt has a result")


async def _discard(attempts: Iterable[_Attempt[T]], discard: Callable[[T], Awaitable[None]] | None) -> None:
    for attempt in attempts:
        attempt.task.cancel()
    for attempt in attempts:
        await asyncio.wait({attempt.task})
        if not attempt.task.cancelled() and attempt.task.exception() is None and discard is not None:
            # If this fails, the reaper removes the sandbox.
            with contextlib.suppress(Exception):
                await discard(attempt.task.result())


async def first_healthy(calls: Iterable[Callable[[], Awaitable[T]]]) -> T:
    """Call all replicas at once, return the first success and cancel the others.

    Only for reads and verification, since each replica runs the call.

    Args:
        calls: one call for each replica.

    Raises:
        ConfigError: there are no calls.
        Exception: the error of the first replica, if all fail.
    """
    attempts = [_start(call) for call in calls]
    if not attempts:
        raise ConfigError("first_healthy needs at least one call")
    try:
        return (await _first_success(attempts)).task.result()
    finally:
        await asyncio.shield(asyncio.ensure_future(_discard(attempts, None)))
