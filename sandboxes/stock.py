"""What keeps a pool filled: decides who gets which sandbox, what is created and what goes, and sees to it.

Invariant: all decisions are made in ``dispatch``, between two awaits, from the state of that moment; whatever takes
time (creating, resetting, removing) runs in a task of its own that ends in a change of state and a new decision. A
verdict about a sandbox is void once its state has changed since it was probed. What was created is removed, however
that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

from agentkit.errors import AgentkitError, BreakerOpen, PoolExhausted, SandboxLost
from agentkit.sandboxes.aio import begin, ended
from agentkit.sandboxes.backoff import Backoff, Setbacks
from agentkit.sandboxes.breaker import Breaker
from agentkit.sandboxes.care import Care
from agentkit.sandboxes.hedge import Hedge
from agentkit.sandboxes.ledger import COUNTED, Counters, Ledger, Line, Place
from agentkit.sandboxes.sandbox import Sandbox

FAULTS = 3
"""Creations in a row that the engine may refuse; at the next one the breaker opens."""
CRASH_LOOP = 3
"""Rounds in a row in which sandboxes could not be made for another reason, or died at once, until callers get the
cause at once instead of waiting."""
RESTARTS = Backoff(factor=6.0, least=2 / 3)
"""Between two such rounds: three quick ones, then two or three a minute."""
PROVED_AFTER = 10.0
"""Seconds of life after which a sandbox proves that creation works."""
SURPLUS_AFTER = 60.0
"""Seconds after which idle sandboxes beyond ``min_idle`` are removed."""
REMOVE_TIMEOUT = 30.0
"""Seconds that ``close`` gives the engine to remove what is left."""

_ON_TRIAL = frozenset({"creating", "idle", "checking"})


@dataclass(frozen=True)
class StockSettings:
    """See ``SandboxPool``."""

    min_idle: int
    max_size: int
    max_uses: int | None
    max_age: float
    refill_concurrency: int | None


class Stock:
    """The sandboxes of one pool and those who wait for them."""

    def __init__(
        self, settings: StockSettings, care: Care, breaker: Breaker, hedge: Hedge | None, rng: random.Random
    ) -> None:
        self.settings, self.care, self.breaker = settings, care, breaker
        self.ledger, self.line = Ledger(settings.max_size), Line()
        self.counters = Counters()
        self.pressure: str | None = None
        self.refusals = Setbacks(rng)
        """Creations that failed because of the engine."""
        self.failures = Setbacks(rng, RESTARTS)
        """Creations that failed for another reason, and sandboxes that died at once."""
        self._died = False
        """Among the failures is a death: only a sandbox that lives shows that it is over."""
        self.closed = False
        self.changed = asyncio.Event()
        """Set at every change; who waits for one clears it first."""
        self.now: Callable[[], float] = asyncio.get_running_loop().time
        self._hedge, self._rng = hedge, rng
        self._at_once = max(2, os.cpu_count() or 2)
        self._gently = settings.refill_concurrency or max(1, ceil(0.2 * settings.min_idle))
        self._removals = asyncio.Semaphore(self._at_once)
        self._backoff = Backoff()
        self._making: set[asyncio.Task[None]] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._alarm: asyncio.TimerHandle | None = None

    # Decisions.

    def wake(self) -> None:
        """Something has changed: decide anew, once, before anything else happens."""
        self.changed.set()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Serve who waits, turn away who waits in vain, and fill up."""
        self._scheduled = False
        if self.closed:
            return
        self._serve()
        if len(self.line) and not self._hope():
            if self.breaker.state == "open":
                self.line.turn_away(self.breaker.error)
            elif self.failures.count > CRASH_LOOP and self.failures.not_before > self.now():
                self.line.turn_away(self._crash_loop)
        self._trim()
        self._refill()

    def has_room_for_one_more(self) -> bool:
        """Whether a newcomer will be served without anybody giving anything back."""
        soon = self.ledger.count("idle", "checking", "creating", "resetting")
        return soon + self.ledger.room > len(self.line)

    def _hope(self) -> int:
        """How many may become free without another creation."""
        hope = self.ledger.count("idle", "checking", "creating", "resetting")
        return hope + (self.ledger.count("busy") if self.settings.max_uses != 1 else 0)

    def _serve(self) -> None:
        for place in self.ledger.idle() if len(self.line) else ():
            if not len(self.line):
                return
            if why := self.care.unusable(place.box):
                self.retire(place, why)
                continue
            self.ledger.move(place, "busy", self.now())
            self.line.serve(place)

    def _crash_loop(self) -> PoolExhausted:
        wait = max(0.0, self.failures.not_before - self.now())
        return PoolExhausted(
            f"no sandbox lives: {self.failures.count} times in a row they could not be made or died at once, the last: "
            f"{self.failures.error}. The next is tried in {wait:.0f} s; look at the image, setup and ready",
            busy=self.ledger.count("busy"),
            waiting=len(self.line),
            retry_after=wait,
        )

    def _trim(self) -> None:
        """What is too old, or idle in vain, goes. Watched regularly: every ping ends in a decision."""
        now, surplus = self.now(), self.ledger.count("idle") - self.settings.min_idle
        for place in self.ledger:
            if place.state in ("idle", "busy") and now - place.born >= PROVED_AFTER:
                self.prove(place)
        for place in self.ledger.idle():
            if now - place.born >= self.settings.max_age:
                self.retire(place, "old")
            elif surplus > 0 and now - place.since >= SURPLUS_AFTER:
                self.retire(place, "surplus")
                surplus -= 1

    def _refill(self) -> None:
        not_before = max(self.refusals.not_before, self.failures.not_before)
        wait = max(not_before - self.now(), self.breaker.retry_after)
        if wait > 0:
            self._dispatch_in(wait)
            return
        demand = len(self.line)
        soon = self.ledger.count("idle", "checking", "creating", "resetting")
        number = min(
            demand + self.settings.min_idle - soon,
            self.ledger.room,
            (max(self._gently, self._at_once) if demand else self._gently) - self.ledger.count("creating"),
            # Should the engine no longer remove anything, sandboxes must not pile up behind the pool's back.
            self.settings.max_size - self.ledger.count("removing"),
        )
        if self.breaker.room is not None:
            number = min(number, self.breaker.room)
        if self.failures.count > 1:
            # One at a time, until one has lived, is enough to see whether it is over. After the first round it is not
            # known yet whether it was an accident, so that all are replaced at once.
            on_trial = any(place.state in _ON_TRIAL and not place.proved for place in self.ledger)
            number = min(number, 0 if on_trial else 1)
        if self.pressure is None:
            for _ in range(number):
                self.create()

    def _dispatch_in(self, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        # A little later than asked for: a timer that is early by rounding would only set itself again.
        self._alarm = asyncio.get_running_loop().call_later(seconds + 0.001, self.dispatch)

    # Work.

    def create(self, *, extra: bool = False) -> tuple[Place, asyncio.Task[None]]:
        """Begin to create a sandbox; an ``extra`` one is ``busy`` when it is done. The task raises what failed."""
        place = self.ledger.open(self.now(), extra=extra)
        return place, self._make(place, self._create(place), "not created")

    def abandon(self, place: Place, task: asyncio.Task[None]) -> None:
        """Nobody waits for an extra one any more."""
        task.cancel()
        # It may have been done at that very moment.
        task.add_done_callback(lambda _: self.retire(place, "taker left") if place.state == "busy" else None)

    async def _create(self, place: Place) -> None:
        with self.breaker.call("create"):
            place.sandbox = await self._new()
        self.counters.created += 1
        self.refusals.clear()
        self.care.watch(place, self.lost)
        await self.care.prepare(place)
        if not self._died:
            self.failures.clear()
        if not place.extra:
            await self.care.rest(place)
        if place.ill:
            raise SandboxLost(f"sandbox {place.box.id} ended while it was made: {place.ill}", reason=place.ill)
        if not self.closed:
            self.ledger.move(place, "busy" if place.extra else "idle", self.now())

    async def _new(self) -> Sandbox:
        if self._hedge is None:
            return await self.care.create()
        return await self._hedge.run(
            "create", self.care.create, discard=Sandbox.close, may=lambda: self.ledger.room > 0
        )

    def reset(self, place: Place) -> None:
        """Begin to make one that was used as good as new."""
        self.ledger.move(place, "resetting", self.now())
        self._make(place, self._reset(place), "reset failed")

    async def _reset(self, place: Place) -> None:
        with self.breaker.call("reset") if self.care.engine_resets else contextlib.nullcontext():
            await self.care.renew(place)
            await self.care.rest(place)
        if not (place.ill or self.care.unusable(place.box) or self.closed):
            self.counters.reset += 1
            self.ledger.move(place, "idle", self.now())

    def _make(self, place: Place, work: Coroutine[Any, Any, None], otherwise: str) -> asyncio.Task[None]:
        """Do ``work``; a place that it leaves unfinished is given up, even if it never took its first step."""

        def done(task: asyncio.Task[None]) -> None:
            created = place.state == "creating"
            if place.state in ("creating", "resetting"):
                if place.sandbox is None:
                    self.ledger.move(place, "gone", self.now())
                else:
                    self.retire(place, place.ill or ("closed" if self.closed else otherwise))
            error = None if task.cancelled() else task.exception()
            if created and isinstance(error, Exception):
                self._stumble(error, place.born)
            self.wake()

        return begin(work, self._making, done)

    def give_back(self, place: Place, discard: bool) -> None:
        """Somebody has used it: what may be used again is reset, the rest goes."""
        place.uses += 1
        why = place.ill or self.care.unusable(place.box) or ("discarded" if discard else "")
        if not why:
            self.prove(place)
            if self.closed:
                why = "closed"
            elif place.extra or (self.settings.max_uses is not None and place.uses >= self.settings.max_uses):
                why = "used"
            elif self.now() - place.born >= self.settings.max_age:
                why = "old"
        if why:
            self.retire(place, why)
        else:
            self.reset(place)

    def hand_back(self, place: Place) -> None:
        """Nobody has used it: it is as good as before."""
        if place.ill or place.extra or self.closed:
            self.retire(place, place.ill or "closed")
        else:
            self.ledger.move(place, "idle", self.now())
            self.wake()

    def retire(self, place: Place, reason: str) -> None:
        """Take it out of the pool now, and remove it in due course; done if it is on its way already."""
        if place.state not in COUNTED:
            return
        place.unwatch()
        self.ledger.move(place, "removing", self.now())
        self.counters.retired[reason] = self.counters.retired.get(reason, 0) + 1

        def done(task: asyncio.Task[None]) -> None:
            self.counters.left_behind += task.cancelled() or task.exception() is not None
            self.ledger.move(place, "gone", self.now())
            self.wake()

        begin(self._remove(place), self._removing, done)
        self.wake()

    async def _remove(self, place: Place) -> None:
        failures = 0
        while True:
            # Held only while the engine is asked: whoever waits to try again keeps nobody from trying.
            async with self._removals:
                if await self.care.remove(place.box):
                    return
            failures += 1
            await asyncio.sleep(self._backoff.delay(failures, self._rng))

    # Consequences.

    def _stumble(self, error: Exception, began: float) -> None:
        """A creation that began then has failed."""
        if isinstance(error, BreakerOpen):
            return
        self.counters.create_failures += 1
        if self.breaker.is_fault(error):
            self.refusals.add(error, self.now())
            if self.refusals.count > FAULTS and self.breaker.state != "open":
                self.breaker.trip(f"{self.refusals.count} creations in a row failed, the last with: {error}")
            return
        self.failures.add(error, self.now(), began=began)
        if isinstance(error, AgentkitError) and not error.retryable and not self._hope():
            self.line.turn_away(lambda: copy.copy(error))

    def prove(self, place: Place) -> None:
        """It has worked: creation does."""
        if not place.proved:
            place.proved = True
            self.failures.clear()
            self._died = False

    def lost(self, place: Place, reason: str) -> None:
        """Its sandbox can do no more work."""
        if place.state in ("idle", "checking", "degraded"):
            self.retire(place, reason)
            age = self.now() - place.born
            if not place.proved and age < PROVED_AFTER:
                self.counters.create_failures += 1
                error = SandboxLost(f"{place.box.id} died {age:.1f} s after it was made: {reason}", reason=reason)
                self.failures.add(error, self.now(), began=place.born)
                self._died = True
        else:
            place.fall_ill(reason)
            place.box.condemn(reason)

    # What the monitor finds (see ``monitor.Ward``).

    def places(self) -> Iterable[Place]:
        return self.ledger

    def condemn(self, place: Place, epoch: int, reason: str) -> None:
        """It should not be used again, judged by what it was in ``epoch``."""
        if place.epoch != epoch:
            return
        if place.state in ("idle", "checking", "degraded"):
            self.retire(place, reason)
        elif place.state in ("busy", "resetting"):
            place.fall_ill(reason)
            place.box.condemn(reason)  # who uses it learns of it at once

    def eject(self, place: Place, epoch: int, reason: str) -> None:
        """It is slow: set it aside."""
        if place.epoch == epoch and place.state == "idle":
            place.box.note_slowness(True, reason)
            self.ledger.move(place, "degraded", self.now())
            self.wake()
        elif place.epoch == epoch and place.state == "busy":
            place.fall_ill("slow")

    def restore(self, place: Place, reason: str) -> None:
        """It is no longer slow."""
        if place.state == "degraded":
            place.box.note_slowness(False, reason)
            self.ledger.move(place, "idle", self.now())
            self.wake()
        elif place.ill == "slow":
            place.ill = ""

    def begin_check(self, place: Place) -> bool:
        """Keep an idle one from being handed out for a moment; False if it is not idle any more."""
        if place.state != "idle":
            return False
        since = place.since
        self.ledger.move(place, "checking", self.now())
        place.since = since
        return True

    def end_check(self, place: Place, epoch: int, reason: str) -> None:
        if place.epoch != epoch or place.state != "checking":
            return
        if reason:
            self.retire(place, reason)
            return
        since = place.since
        self.ledger.move(place, "idle", self.now())
        place.since = since  # it stays where it was in the order of idle ones
        self.wake()

    def press(self, reason: str | None) -> None:
        """Why the host takes no more, or None."""
        self.pressure = reason
        self.wake()

    # The end.

    def drain(self, error: Callable[[], Exception]) -> None:
        """From now on nothing is created or handed out: turn everybody in line away, remove what nobody uses."""
        self.closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self.line.turn_away(error)
        for task in self._making:
            task.cancel()
        for place in self.ledger:
            if place.state in ("idle", "checking", "degraded"):
                self.retire(place, "closed")

    async def close(self) -> None:
        """After ``drain``: remove everything, in use or not. Bounded."""
        await ended(self._making, REMOVE_TIMEOUT)
        for place in self.ledger:
            if place.sandbox is not None:
                self.retire(place, "closed")
        await ended(self._removing, REMOVE_TIMEOUT)
