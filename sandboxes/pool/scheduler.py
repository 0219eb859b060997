"""Assign sandboxes to callers in order of arrival, and keep the pool filled.

Invariant: all decisions are made between two awaits, in ``dispatch``, from the state of that moment. Creating,
resetting and removing run as tasks that end with a change of state and a new decision. Every sandbox that was created
is removed, however its task ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Coroutine
from typing import Any

from agentkit.errors import AgentkitError, BreakerOpen, PoolClosed, PoolExhausted, QuotaExceeded, SandboxLost
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.pool import decisions
from agentkit.sandboxes.pool.breaker import Breaker, is_engine_fault
from agentkit.sandboxes.pool.decisions import CreationFailures, PoolSettings
from agentkit.sandboxes.pool.provisioner import Provisioner
from agentkit.sandboxes.pool.slots import COUNTED, Counters, PoolStats, Slot, Slots
from agentkit.sandboxes.pool.waiters import WaitQueue
from agentkit.sandboxes.tasks import begin, ended

REMOVE_TIMEOUT = 30.0
"""Seconds that the engine gets to remove the last sandboxes of a pool."""


class Scheduler:
    """The slots of one pool and the callers that wait for them."""

    def __init__(self, settings: PoolSettings, provisioner: Provisioner, breaker: Breaker, rng: random.Random) -> None:
        self._settings, self._provisioner, self._breaker, self._rng = settings, provisioner, breaker, rng
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self.slots = Slots(settings.max_size, self._now)
        self.counters = Counters()
        self.waiters = WaitQueue()
        self._failures = CreationFailures(rng)
        self._pressure: str | None = None
        self._closed = False
        self._changed = asyncio.Event()
        self._dispatch_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._creations: set[asyncio.Task[None]] = set()
        """Tasks that create or reset."""
        self._removals: set[asyncio.Task[None]] = set()
        self._removing = asyncio.Semaphore(provisioner.backend.concurrency)
        self._backoff = Backoff()

    # Callers.

    async def acquire(self, timeout: float, avoid_hosts: tuple[str, ...] = ()) -> Slot:
        """Wait for a healthy sandbox. Arguments and errors as for ``SandboxPool.acquire``."""
        self._check_open()
        began = self._now()
        if avoid_hosts:
            slot = await self._create_extra(began + timeout, avoid_hosts)
        elif self._settings.on_exhausted == "wait" or self.slots.available + self.slots.free > len(self.waiters):
            slot = await self._acquire_in_turn(began + timeout)
        elif self._settings.on_exhausted == "create":
            slot = await self._create_extra(began + timeout)
        else:
            slot = None
        if slot is None:
            raise self._exhausted(self._now() - began)
        self.counters.acquired += 1
        return slot

    def release(self, slot: Slot, *, discard: bool) -> None:
        """Reset the sandbox for its next use, or retire it."""
        self.counters.released += 1
        if slot.state != "busy":
            return  # the pool was closed meanwhile
        slot.uses += 1
        why = slot.failure or self._provisioner.unusable(slot.box) or ("discarded" if discard else "")
        if not why:
            self._prove(slot)
            why = "closed" if self._closed else decisions.why_not_reused(slot, self._settings, self._now())
        if why:
            self.retire(slot, why)
        else:
            self.slots.move(slot, "resetting")
            self._start(slot, self._reset(slot), "reset failed")

    async def wait_filled(self) -> None:
        """Wait until ``min_idle`` sandboxes are idle. Raises ``PoolClosed``."""
        while self.slots.count("idle") < self._settings.min_idle:
            self._check_open()
            await self._change()
        self._check_open()

    def stats(self) -> PoolStats:
        count = self.slots.count
        return PoolStats(
            size=self.slots.size,
            idle=count("idle", "checking"),
            busy=count("busy"),
            creating=count("creating", "resetting"),
            degraded=count("degraded"),
            removing=count("removing"),
            extra=self.slots.extra,
            waiting=len(self.waiters),
            breaker=self._breaker.state,
            failures=self._failures.count,
            retry_after=max(0.0, self._failures.not_before - self._now()),
            pressure=self._pressure,
            counters=dataclasses.replace(self.counters, retired=dict(self.counters.retired)),
        )

    def stop(self) -> None:
        """Create and hand out nothing from now on; reject waiting callers and remove what is not in use."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.waiters.reject(_closed)
        self._changed.set()
        for task in self._creations:
            task.cancel()
        for slot in self.slots:
            if slot.state in ("idle", "checking", "degraded"):
                self.retire(slot, "closed")

    async def drained(self) -> None:
        """Wait until no sandbox is in use."""
        while self.slots.count("busy") or self.slots.extra:
            await self._change()

    async def close(self) -> None:
        """After ``stop``: remove all sandboxes, including those in use, in bounded time."""
        await ended(self._creations, REMOVE_TIMEOUT)
        for slot in self.slots:
            if slot.sandbox is not None:
                self.retire(slot, "closed")
        await ended(self._removals, REMOVE_TIMEOUT)

    async def _acquire_in_turn(self, deadline: float) -> Slot | None:
        ticket = self.waiters.ticket()
        warm = self.slots.count("idle") > len(self.waiters)
        while (slot := await self._wait_in_turn(ticket, deadline)) is not None:
            if await self._is_ready(slot):
                self.counters.hits += warm
                return slot
            self.counters.rejected += 1
        return None

    async def _wait_in_turn(self, ticket: int, deadline: float) -> Slot | None:
        waiter = self.waiters.join(ticket)
        self.dispatch()
        try:
            await asyncio.wait({waiter}, timeout=max(0.0, deadline - self._now()))
        except asyncio.CancelledError:
            if waiter.done() and waiter.exception() is None:
                self._return_unused(waiter.result())
            raise
        finally:
            self.waiters.leave(ticket)
        return waiter.result() if waiter.done() else None

    async def _is_ready(self, slot: Slot) -> bool:
        """Wake the sandbox and check it; retire it if the check fails."""
        try:
            why = await self._provisioner.wake(slot)
        except BaseException:
            self.retire(slot, "caller left")
            raise
        why = why or slot.failure or ("closed" if self._closed else "")
        if why:
            self.retire(slot, why)
            self._check_open()
        return not why

    async def _create_extra(self, deadline: float, avoid_hosts: tuple[str, ...] = ()) -> Slot | None:
        """Create a sandbox beyond ``max_size``. Raises what its creation raises."""
        slot = self.slots.open(extra=True)
        slot.avoid_hosts = avoid_hosts
        task = self._start(slot, self._create(slot), "not created")
        created = False
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - self._now()))
            if not task.done():
                return None
            if not task.cancelled():
                task.result()
            if slot.state != "busy":
                raise _closed()
            created = True
            return slot
        finally:
            if not created:
                task.cancel()
                # It may have finished at this moment.
                task.add_done_callback(lambda _: self.retire(slot, "caller left") if slot.state == "busy" else None)

    def _return_unused(self, slot: Slot) -> None:
        if slot.failure or self._closed:
            self.retire(slot, slot.failure or "closed")
        else:
            self.slots.move(slot, "idle")
            self.update()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    def _exhausted(self, seconds: float) -> PoolExhausted:
        self.counters.exhausted += 1
        now, error = self.stats(), self._failures.last_error
        cause = now.pressure or (f"the last sandbox failed: {error}" if error else "all are in use")
        return PoolExhausted(
            f"no sandbox became free in {seconds:.1f} s: {now.busy} in use, {now.creating} being created, "
            f"{now.waiting} callers waiting, max_size={self._settings.max_size}; {cause}. Raise max_size or "
            "acquire_timeout, or release sandboxes earlier",
            busy=now.busy,
            waiting=now.waiting,
        )

    # Decisions.

    def update(self) -> None:
        """The state has changed: make new decisions, once, in the next iteration of the event loop."""
        self._changed.set()
        if not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Serve waiting callers, reject those that wait in vain, and create sandboxes."""
        self._dispatch_due = False
        if self._closed:
            return
        self._serve()
        if len(self.waiters) and not self._may_become_free():
            if self._breaker.state == "open":
                self.waiters.reject(self._breaker.error)
            elif self._failures.crash_loop(self._now()) is not None:
                self.waiters.reject(self._crash_loop)
        self._refill()

    def tend(self) -> None:
        """Do what time alone makes due: prove sandboxes that have lived long enough, and retire old or surplus ones.

        Called regularly, since it visits all slots.
        """
        if self._closed:
            return
        now = self._now()
        for slot in self.slots:
            if slot.state in ("idle", "busy") and now - slot.opened >= decisions.PROVEN_AFTER:
                self._prove(slot)
        for slot, reason in decisions.to_retire(self.slots, self._settings, now):
            self.retire(slot, reason)
        self.update()

    def _serve(self) -> None:
        while len(self.waiters) and (slot := self.slots.longest_idle()) is not None:
            if why := self._provisioner.unusable(slot.box):
                self.retire(slot, why)
                continue
            self.slots.move(slot, "busy")
            self.waiters.serve(slot)

    def _may_become_free(self) -> bool:
        """Return whether a sandbox may become free without another creation."""
        return self.slots.available > 0 or (self._settings.max_uses != 1 and self.slots.count("busy") > 0)

    def _crash_loop(self) -> PoolExhausted:
        wait = self._failures.crash_loop(self._now()) or 0.0
        return PoolExhausted(
            f"no sandbox survives: {self._failures.count} times in a row they could not be created or died at once, "
            f"the last: {self._failures.last_error}. The next attempt is in {wait:.0f} s; check image, setup and ready",
            busy=self.slots.count("busy"),
            waiting=len(self.waiters),
            retry_after=wait,
        )

    def _refill(self) -> None:
        wait = max(self._failures.not_before - self._now(), self._breaker.retry_after)
        if wait > 0:
            if self._timer is not None:
                self._timer.cancel()
            # A little later, since a timer that fires early by rounding would only be set again.
            self._timer = asyncio.get_running_loop().call_later(wait + 0.001, self.dispatch)
            return
        at_once = self._provisioner.backend.concurrency
        number = decisions.creations(
            self.slots, len(self.waiters), self._settings, at_once=at_once, one_by_one=self._failures.one_by_one
        )
        if self._breaker.room is not None:
            number = min(number, self._breaker.room)
        for _ in range(number if self._pressure is None else 0):
            slot = self.slots.open()
            self._start(slot, self._create(slot), "not created")

    # Operations on a slot.

    async def _create(self, slot: Slot) -> None:
        with self._breaker.call("create"):
            self.slots.fill(slot, await self._provisioner.create(lambda: self.slots.free > 0, slot.avoid_hosts))
        self.counters.created += 1
        host = self._provisioner.backend.host_of(slot.box.id)
        telemetry.report(telemetry.Created(host, self._now() - slot.opened))
        self._failures.engine_worked()
        slot.unwatch = self._provisioner.watch(slot, lambda reason: self.lost(slot, reason))
        await self._provisioner.prepare(slot.box)
        self._failures.sandbox_started()
        if not slot.extra:
            await self._provisioner.rest(slot)
        if slot.failure:
            raise SandboxLost(f"sandbox {slot.box.id} ended while it was created: {slot.failure}", reason=slot.failure)
        if not self._closed:
            self.slots.move(slot, "busy" if slot.extra else "idle")

    async def _reset(self, slot: Slot) -> None:
        with self._breaker.call("reset") if self._provisioner.engine_resets else contextlib.nullcontext():
            await self._provisioner.reset(slot.box)
            await self._provisioner.rest(slot)
        if not (slot.failure or self._provisioner.unusable(slot.box) or self._closed):
            self.counters.reset += 1
            self.slots.move(slot, "idle")

    def _start(self, slot: Slot, work: Coroutine[Any, Any, None], unfinished: str) -> asyncio.Task[None]:
        """Run ``work`` as a task; retire the slot if the task leaves it unfinished, even if it never started."""

        def done(task: asyncio.Task[None]) -> None:
            created = slot.state == "creating"
            if slot.state in ("creating", "resetting"):
                if slot.sandbox is None:
                    self.slots.move(slot, "gone")
                else:
                    self.retire(slot, slot.failure or ("closed" if self._closed else unfinished))
            error = None if task.cancelled() else task.exception()
            if created and isinstance(error, Exception):
                self._creation_failed(error, slot.opened)
            self.update()

        return begin(work, self._creations, done)

    def retire(self, slot: Slot, reason: str) -> None:
        """Take the slot out of use now and remove its sandbox in a task."""
        if slot.state not in COUNTED:
            return
        slot.unwatch()
        host = self._provisioner.backend.host_of(slot.box.id)
        telemetry.report(telemetry.Retired(slot.box.id, host, reason, in_use=slot.state == "busy" and not slot.spare))
        self.slots.move(slot, "removing")
        self.counters.retired[reason] = self.counters.retired.get(reason, 0) + 1

        def done(task: asyncio.Task[None]) -> None:
            self.counters.left_behind += task.cancelled() or task.exception() is not None
            self.slots.move(slot, "gone")
            self.update()

        begin(self._remove(slot), self._removals, done)
        self.update()

    async def _remove(self, slot: Slot) -> None:
        failures = 0
        while True:
            async with self._removing:  # released between two attempts, so that others can be removed meanwhile
                if await self._provisioner.remove(slot.box):
                    return
            failures += 1
            await asyncio.sleep(self._backoff.delay(failures, self._rng))

    def _creation_failed(self, error: Exception, began: float) -> None:
        if isinstance(error, BreakerOpen):
            return
        self.counters.create_failures += 1
        telemetry.report(telemetry.CreationFailed(type(error).__name__))
        if is_engine_fault(error):
            cause = self._failures.engine_failed(error, self._now())
            if cause and self._breaker.state != "open":
                self._breaker.trip(cause)
            return
        if isinstance(error, QuotaExceeded) and error.retryable:
            self._failures.engine_full(error, self._now(), began)
            return
        self._failures.sandbox_failed(error, self._now(), began)
        if isinstance(error, AgentkitError) and not error.retryable and not self._may_become_free():
            self.waiters.reject(lambda: copy.copy(error))

    def _prove(self, slot: Slot) -> None:
        if not slot.proven:
            slot.proven = True
            self._failures.sandbox_lived()

    # Results of health checks.

    def lost(self, slot: Slot, reason: str) -> None:
        """The sandbox has ended."""
        age, unused = self._now() - slot.opened, slot.state in ("idle", "checking", "degraded")
        self.condemn(slot, slot.epoch, reason)
        alone = reason != "engine_down"  # the loss of a host says nothing about sandboxes on other hosts
        if alone and unused and not slot.proven and age < decisions.PROVEN_AFTER:
            self.counters.create_failures += 1
            error = SandboxLost(f"{slot.box.id} died {age:.1f} s after its creation: {reason}", reason=reason)
            self._failures.sandbox_failed(error, self._now(), slot.opened, died=True)

    def condemn(self, slot: Slot, epoch: int, reason: str) -> None:
        """The sandbox must not be used again, unless its state has changed since ``epoch``."""
        if slot.epoch != epoch:
            return
        if slot.state in ("idle", "checking", "degraded"):
            self.retire(slot, reason)
        else:
            slot.fail(reason)
            slot.box.mark_lost(reason)  # calls in flight fail at once

    def eject(self, slot: Slot, reason: str) -> None:
        """The sandbox is slow: set it aside."""
        if slot.state == "idle":
            slot.box.mark_slow(True, reason)
            self.slots.move(slot, "degraded")
            self.update()
        elif slot.state == "busy":
            slot.fail("slow")

    def restore(self, slot: Slot, reason: str) -> None:
        """The sandbox is no longer slow."""
        if slot.state == "degraded":
            slot.box.mark_slow(False, reason)
            self.slots.move(slot, "idle")
            self.update()
        elif slot.failure == "slow":
            slot.failure = ""

    def begin_check(self, slot: Slot) -> bool:
        """Reserve an idle sandbox for a check; return False if it is not idle."""
        if slot.state != "idle":
            return False
        self.slots.move(slot, "checking")
        return True

    def end_check(self, slot: Slot, epoch: int, reason: str) -> None:
        """End a check; ``reason`` says why the sandbox must be replaced, or is empty."""
        if slot.epoch != epoch or slot.state != "checking":
            return
        if reason:
            self.retire(slot, reason)
        else:
            self.slots.move(slot, "idle")
            self.update()

    def set_pressure(self, reason: str | None) -> None:
        """Set why the host takes no more sandboxes, or None."""
        self._pressure = reason
        self.update()


def _closed() -> PoolClosed:
    return PoolClosed("the pool is closing or closed; acquire sandboxes before that, or create another pool")
