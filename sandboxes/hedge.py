"""Hedged calls: when one takes longer than nearly all before it, a second one is started and the first to succeed wins.

Invariant: only for what may be done twice (creating, resetting, reading, verifying; never a command that changes
something); at most one extra call each, and at most ``budget`` of all calls, so that an overloaded engine is not loaded
more. Whatever the loser made is thrown away, also when it ends after all, and nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from agentkit.errors import ConfigError

T = TypeVar("T")
Operation = Literal["create", "reset", "read", "verify"]
_OPERATIONS: frozenset[str] = frozenset({"create", "reset", "read", "verify"})


@dataclass
class HedgeCounts:
    calls: int = 0
    hedged: int = 0
    """Calls for which a second one was started."""
    won: int = 0
    """Times that the second one was first."""


@dataclass
class _Attempt(Generic[T]):
    task: asyncio.Future[T]
    began: float


class Hedge:
    """``after``: the quantile of past durations that a call must exceed, or seconds. ``budget``: share of calls."""

    def __init__(self, after: float | Literal["p50", "p90", "p95", "p99"] = "p95", budget: float = 0.05) -> None:
        if not 0 < budget <= 1:
            raise ConfigError(f"budget={budget} of a hedge must be a share of calls, above 0 and at most 1")
        self._after = after
        self._budget = budget
        self._credit = 0.0
        self._durations: dict[str, deque[float]] = {}
        self._losers: set[asyncio.Task[None]] = set()
        self.counts = HedgeCounts()

    def delay(self, operation: str) -> float | None:
        """Seconds after which a second call would start; None while too little is known."""
        if not isinstance(self._after, str):
            return self._after
        known = sorted(self._durations.get(operation, ()))
        # With fewer there is no telling what is rare; where all take the same time, a little more is not rare either.
        return 1.1 * known[int(len(known) * int(self._after[1:]) / 100)] if len(known) >= 20 else None

    async def run(
        self,
        operation: Operation,
        attempt: Callable[[], Awaitable[T]],
        *,
        discard: Callable[[T], Awaitable[None]] | None = None,
        may: Callable[[], bool] = lambda: True,
    ) -> T:
        """The result of ``attempt()``, or of a second one. ``discard`` gets what a loser made; ``may`` is asked whether
        there is room for a second. If all fail, the first error is raised."""
        if operation not in _OPERATIONS:
            raise ConfigError(f"{operation!r} is never hedged: only {', '.join(sorted(_OPERATIONS))} may be done twice")
        self.counts.calls += 1
        self._credit = min(self._credit + self._budget, 1.0)
        attempts = [_start(attempt)]
        try:
            await asyncio.wait({attempts[0].task}, timeout=self.delay(operation))
            if not attempts[0].task.done() and self._credit >= 1.0 - 1e-9 and may():
                self._credit = 0.0
                self.counts.hedged += 1
                attempts.append(_start(attempt))
            winner = await _first_success(attempts)
        except BaseException:
            await self._dismiss(attempts, discard)
            raise
        self.counts.won += attempts.index(winner) == 1
        self._learn(operation, attempts)
        losers = [attempt for attempt in attempts if attempt is not winner]
        if losers:
            cleaning = asyncio.ensure_future(_throw_away(losers, discard))
            self._losers.add(cleaning)
            cleaning.add_done_callback(self._losers.discard)
        return winner.task.result()

    async def close(self) -> None:
        """Wait until all losers are gone."""
        while self._losers:
            await asyncio.wait(self._losers)

    def _learn(self, operation: str, attempts: Iterable[_Attempt[T]]) -> None:
        # The loser would have taken at least this long: leaving it out would make the quantile ever shorter.
        now = asyncio.get_running_loop().time()
        known = self._durations.setdefault(operation, deque(maxlen=200))
        known.extend(now - attempt.began for attempt in attempts)

    async def _dismiss(self, attempts: list[_Attempt[T]], discard: Callable[[T], Awaitable[None]] | None) -> None:
        cleaning = asyncio.ensure_future(_throw_away(attempts, discard))
        self._losers.add(cleaning)
        cleaning.add_done_callback(self._losers.discard)
        # Cancelled once more meanwhile, the caller leaves; the cleaning goes on and ``close`` waits for it.
        await asyncio.shield(cleaning)


def _start(attempt: Callable[[], Awaitable[T]]) -> _Attempt[T]:
    return _Attempt(asyncio.ensure_future(attempt()), asyncio.get_running_loop().time())


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


async def _throw_away(attempts: Iterable[_Attempt[T]], discard: Callable[[T], Awaitable[None]] | None) -> None:
    for attempt in attempts:
        attempt.task.cancel()
    for attempt in attempts:
        await asyncio.wait({attempt.task})
        if not attempt.task.cancelled() and attempt.task.exception() is None and discard is not None:
            # Its own errors are its own affair: what it could not remove, the reaper will.
            with contextlib.suppress(Exception):
                await discard(attempt.task.result())


async def first_healthy(calls: Iterable[Callable[[], Awaitable[T]]]) -> T:
    """Ask all replicas at once; the first that answers wins, the others are cancelled.

    For reads and verification only: each replica runs the call. If all fail, the first one's error is raised.
    """
    attempts = [_start(call) for call in calls]
    if not attempts:
        raise ConfigError("there is no replica to ask")
    try:
        return (await _first_success(attempts)).task.result()
    finally:
        await asyncio.shield(asyncio.ensure_future(_throw_away(attempts, None)))
