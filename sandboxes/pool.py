"""Warm sandboxes, ready to be taken: in order of arrival, checked before they are handed out, replaced when used.

Invariant: idle + busy + creating never exceeds ``max_size``; nobody is overtaken; nothing dead, hung or ill is handed
out; whatever the pool made is gone when ``close`` returns. What was taken comes back exactly once, however its taker
ends, also when it is cancelled at any point of taking.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Callable
from typing import Literal

from agentkit.errors import AgentkitError, ConfigError, PoolClosed, PoolExhausted, SandboxError
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.breaker import Breaker
from agentkit.sandboxes.care import Care, Reset
from agentkit.sandboxes.health import HealthPolicy, HostUsage
from agentkit.sandboxes.hedge import Hedge
from agentkit.sandboxes.ledger import Place, PoolStats
from agentkit.sandboxes.monitor import Monitor
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.stock import Stock, StockSettings


class Lease:
    """A sandbox taken from a pool. ``release`` it once done; a second time does nothing."""

    def __init__(self, pool: SandboxPool, place: Place) -> None:
        self.box = place.box
        self._pool = pool
        self._place: Place | None = place

    @property
    def ill(self) -> str:
        """Why it must not be used any more (lost, hung, slow), as far as the pool knows; empty if nothing is wrong."""
        return self._place.ill if self._place is not None else "released"

    def watch(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the reason once it becomes ill while it is taken."""
        if self._place is not None:
            self._place.watchers.append(tell)
            if self._place.ill:
                tell(self._place.ill)

    async def restart(self) -> bool:
        """Start it again with empty temporary file systems; whether that worked."""
        try:
            await self.box.restart()
        except SandboxError:
            return False
        if self._place is not None:
            self._place.ill = ""
        return True

    def release(self, *, discard: bool = False) -> None:
        """Give it back at once; the pool removes or resets it by itself. ``discard`` if it must not be used again."""
        place, self._place = self._place, None
        if place is not None:
            place.watchers.clear()
            self._pool._release(place, discard)


class SandboxPool:
    """Sandboxes of one specification. Start it by ``async with``, take from it by ``async with pool.acquire() as box``.

    ``min_idle`` sandboxes are kept ready, ``running`` (taken in about a millisecond) or ``paused`` (uses no processor
    time), and there are never more than ``max_size``. After ``max_uses`` uses, or ``max_age`` seconds, one is replaced;
    between uses it is reset: ``snapshot`` puts the files back that it had when it was new, a coroutine function does
    what it likes, ``recreate`` means that each use gets a new one. ``acquire_timeout`` is in seconds.
    ``on_exhausted`` says what happens when all ``max_size`` are in use: ``wait`` in line, ``fail`` at once with
    ``PoolExhausted``, or ``create`` an extra one for this use. ``refill_concurrency`` bounds creations at one time
    while nobody waits; with callers in line there are as many as processors.
    """

    def __init__(
        self,
        spec: SandboxSpec | None = None,
        backend: Backend | str = "docker",
        *,
        min_idle: int = 2,
        max_size: int = 8,
        warm: Literal["running", "paused"] = "running",
        max_uses: int | None = 1,
        max_age: float = 3600.0,
        acquire_timeout: float = 60.0,
        drain_timeout: float = 30.0,
        refill_concurrency: int | None = None,
        on_exhausted: Literal["wait", "fail", "create"] = "wait",
        reset: Reset = "recreate",
        health: HealthPolicy | None = None,
        hedge: Hedge | None = None,
        breaker: Breaker | None = None,
        host: Callable[[], HostUsage] | None = None,
        seed: int | None = None,
    ) -> None:
        """``hedge`` hedges creations; a ``breaker`` may be shared by pools of one engine; ``host`` measures the machine
        that the sandboxes run on, so that nothing is created beyond its watermark (``health.local_host``); ``seed``
        fixes the jitter. Raises ``ConfigError`` for settings that contradict each other."""
        if not 0 <= min_idle <= max_size or max_size < 1:
            raise ConfigError(f"min_idle={min_idle} and max_size={max_size}: 0 <= min_idle <= max_size, and at least 1")
        if (max_uses == 1) != (reset == "recreate"):
            raise ConfigError(
                f"max_uses={max_uses} with reset={reset!r}: what is used more than once must be reset in between "
                "('snapshot' or a function), and what is used once never is ('recreate')"
            )
        self.spec = spec or SandboxSpec()
        self.acquire_timeout, self.drain_timeout = acquire_timeout, drain_timeout
        self.rng = random.Random(seed)
        self._settings = StockSettings(min_idle, max_size, max_uses, max_age, refill_concurrency)
        self._on_exhausted, self._policy, self._host = on_exhausted, health or HealthPolicy(), host
        self._breaker, self._hedge = breaker, hedge
        self._care = Care(self.spec, backend, warm, reset, self._policy)
        self._stock: Stock | None = None
        self._monitor: Monitor | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()

    # Life.

    async def start(self) -> None:
        """Connect to the engine and begin to fill up. Raises ``EngineUnavailable``."""
        if self._stock is not None:
            return
        await self._care.start()
        clock = asyncio.get_running_loop().time
        breaker = self._breaker or Breaker(f"the {self._care.backend.name} engine", time=clock)
        self._stock = Stock(self._settings, self._care, breaker, self._hedge, self.rng)
        self._monitor = Monitor(self._stock, self._care, self._policy, self.rng, self._host)
        self._monitor.start()
        self._stock.wake()

    async def close(self, drain_timeout: float | None = None) -> None:
        """Turn callers in line away, wait up to ``drain_timeout`` seconds for sandboxes in use, remove all of them.

        Bounded, and twice is fine. Cancelled, it waits for nobody any more but still removes everything.
        """
        if self._stock is None:
            return
        if self._closing is None:
            patience = self.drain_timeout if drain_timeout is None else drain_timeout
            self._closing = asyncio.ensure_future(self._shut_down(self._stock, patience))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._hurry.set()
            await asyncio.wait({self._closing})
            raise

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Taking and giving back.

    @contextlib.asynccontextmanager
    async def acquire(self, timeout: float | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox for the body of ``async with``; errors as ``take``. What broke in the body is not used again."""
        lease = await self.take(timeout)
        try:
            yield lease.box
        except AgentkitError:
            lease.release(discard=True)
            raise
        finally:
            lease.release()

    async def take(self, timeout: float | None = None) -> Lease:
        """The next healthy sandbox, in order of arrival; ``timeout`` in seconds, by default ``acquire_timeout``.

        Raises ``PoolExhausted`` in time, and at once, with the cause, while all that is made dies; ``BreakerOpen`` at
        once while the engine is down and nothing is left; what made creation impossible (``ImageError``,
        ``UnsupportedFeature``), or ``PoolClosed``. An extra one raises
        whatever ``Sandbox.create`` raises.
        """
        stock = self._open_stock()
        began = stock.now()
        deadline = began + (self.acquire_timeout if timeout is None else timeout)
        if self._on_exhausted != "wait" and not stock.has_room_for_one_more():
            if self._on_exhausted == "fail":
                raise self._exhausted(began)
            place = await self._create_extra(stock, deadline, began)
            stock.counters.acquired += 1
            return Lease(self, place)
        ticket = stock.line.ticket()
        warm = stock.ledger.count("idle") > len(stock.line)
        while True:
            place = await self._stand_in_line(stock, ticket, deadline, began)
            if await self._can_be_used(stock, place):
                stock.counters.acquired += 1
                stock.counters.hits += warm
                return Lease(self, place)
            stock.counters.rejected += 1

    async def filled(self) -> None:
        """Returns once ``min_idle`` sandboxes are ready. Raises ``PoolClosed``."""
        while (stock := self._open_stock()).ledger.count("idle") < self._settings.min_idle:
            stock.changed.clear()
            await stock.changed.wait()

    def stats(self) -> PoolStats:
        """What the pool holds now. Raises ``PoolClosed`` if it was never started."""
        stock = self._stock
        if stock is None:
            raise PoolClosed("the pool has not been started: use `async with pool`")
        count = stock.ledger.count
        return PoolStats(
            size=stock.ledger.size,
            idle=count("idle", "checking"),
            busy=count("busy"),
            creating=count("creating", "resetting"),
            degraded=count("degraded"),
            removing=count("removing"),
            extra=stock.ledger.extra,
            waiting=len(stock.line),
            breaker=stock.breaker.state,
            pressure=stock.pressure,
            counters=copy.deepcopy(stock.counters),
        )

    async def _stand_in_line(self, stock: Stock, ticket: int, deadline: float, began: float) -> Place:
        waiter = stock.line.join(ticket)
        stock.dispatch()
        try:
            await asyncio.wait({waiter.served}, timeout=max(0.0, deadline - stock.now()))
        except asyncio.CancelledError:
            if waiter.served.done() and waiter.served.exception() is None:
                stock.hand_back(waiter.served.result())
            raise
        finally:
            stock.line.leave(waiter)
        if not waiter.served.done():
            raise self._exhausted(began)
        return waiter.served.result()

    async def _can_be_used(self, stock: Stock, place: Place) -> bool:
        """Wake it and look; what is no good is replaced, and the caller keeps its place in line."""
        try:
            why = await self._care.ready(place)
        except BaseException:
            stock.retire(place, "taker left")
            raise
        why = why or place.ill or ("closed" if self._closing is not None else "")
        if why:
            stock.retire(place, why)
            self._open_stock()
        return not why

    async def _create_extra(self, stock: Stock, deadline: float, began: float) -> Place:
        place, task = stock.create(extra=True)
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - stock.now()))
            if not task.done():
                raise self._exhausted(began)
            if task.cancelled():
                raise self._closed()
            task.result()
            if place.state != "busy":
                raise self._closed()
        except BaseException:
            stock.abandon(place, task)
            raise
        return place

    def _release(self, place: Place, discard: bool) -> None:
        if self._stock is not None and place.state == "busy":  # else the pool was closed without waiting for it
            self._stock.give_back(place, discard)

    # The end.

    async def _shut_down(self, stock: Stock, patience: float) -> None:
        stock.drain(self._closed)
        deadline = stock.now() + patience
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            while (stock.ledger.count("busy") or stock.ledger.extra) and stock.now() < deadline and not hurry.done():
                stock.changed.clear()
                change = asyncio.ensure_future(stock.changed.wait())
                timeout = max(0.0, deadline - stock.now())
                await asyncio.wait({change, hurry}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            hurry.cancel()
        if self._monitor is not None:
            await self._monitor.stop()
        await stock.close()
        if self._hedge is not None:
            await self._hedge.close()
        stock.counters.left_behind += await self._care.sweep()
        await self._care.close()

    def _open_stock(self) -> Stock:
        if self._stock is None:
            raise PoolClosed("the pool has not been started: use `async with pool`")
        if self._closing is not None:
            raise self._closed()
        return self._stock

    def _closed(self) -> PoolClosed:
        return PoolClosed("the pool is closing or closed; take sandboxes before, or make another pool")

    def _exhausted(self, began: float) -> PoolExhausted:
        stock, now = self._stock, self.stats()
        assert stock is not None
        stock.counters.exhausted += 1
        error = stock.refusals.error or stock.failures.error
        cause = now.pressure or (f"the last sandbox failed: {error}" if error else "all are in use")
        return PoolExhausted(
            f"no sandbox became free in {stock.now() - began:.1f} s: {now.busy} in use, {now.creating} being made, "
            f"{now.waiting} in line, at most {self._settings.max_size}; {cause}. Raise max_size or acquire_timeout, "
            "or give some back",
            busy=now.busy,
            waiting=now.waiting,
        )
