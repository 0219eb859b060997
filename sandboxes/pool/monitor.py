"""Watch the sandboxes of a pool: pings, commands in idle ones, engine events, and a comparison with the engine's list.

Invariant: the monitor only probes and reports; the scheduler decides. Every probe has a timeout and none waits for
another. A result names the state (``epoch``) of the slot that it is about. Events may be lost, doubled or late: an
event only causes a look at the engine, and the comparison repeats it anyway.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from agentkit.errors import SandboxError
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.pool.health import HealthPolicy, HostUsage, SlownessTracker, pressure
from agentkit.sandboxes.pool.provisioner import LIST_TIMEOUT, Provisioner
from agentkit.sandboxes.pool.scheduler import Scheduler
from agentkit.sandboxes.pool.slots import Slot
from agentkit.sandboxes.tasks import loop_time, stopped, tracked
from agentkit.sandboxes.types import Observed

_PINGED = frozenset({"idle", "busy", "degraded"})
_EXPECTED = frozenset({"idle", "checking", "busy", "degraded"})
"""States in which the engine must know the sandbox."""
_PARTS = 20
"""Parts of a round of pings: a large pool sends its pings evenly over the round."""


class HealthMonitor:
    """The probes of ``HealthPolicy``, from ``start`` to ``stop``."""

    def __init__(
        self,
        scheduler: Scheduler,
        provisioner: Provisioner,
        policy: HealthPolicy,
        rng: random.Random,
        host: Callable[[], HostUsage] | None,
    ) -> None:
        self._scheduler, self._provisioner, self._policy = scheduler, provisioner, policy
        self._rng, self._host = rng, host
        self._slowness = SlownessTracker(policy)
        self._pinging: set[Slot] = set()
        self._next_check: dict[Slot, float] = {}
        self._strays: dict[str, float] = {}
        """When each sandbox without a slot was first seen."""
        self._pressed = False
        self.usage: HostUsage | None = None
        """What of this machine was in use at the last look."""
        self._tasks: set[asyncio.Task[object]] = set()
        self._backoff = Backoff(cap=5.0)

    def start(self) -> None:
        for work in (self._ping_all(), self._check_idle(), self._follow_events(), self._reconcile_regularly()):
            tracked(work, self._tasks)

    async def stop(self) -> None:
        """Cancel all probes and wait until they have ended."""
        while self._tasks:  # a task may start others while it ends
            await stopped(set(self._tasks))

    # Pings.

    async def _ping_all(self) -> None:
        due = loop_time()
        while True:
            for part in range(_PARTS):
                # Pings start by the clock, so that hanging sandboxes do not delay their own detection.
                due = max(due + self._policy.ping_interval / _PARTS, loop_time())
                await asyncio.sleep(due - loop_time())
                for slot in self._scheduler.slots:
                    now_due = slot.number % _PARTS == part and slot.state in _PINGED and not slot.paused
                    if now_due and slot not in self._pinging:
                        tracked(self._ping(slot), self._tasks)
            self._judge_slowness()
            self._measure_host()
            self._scheduler.tend()

    async def _ping(self, slot: Slot) -> None:
        epoch, generation = slot.epoch, slot.box.generation
        self._pinging.add(slot)
        try:
            latency = await slot.box.probe(self._policy.ping_timeout, self._policy.ping_failures)
        except SandboxError:
            return  # lost, which its connection reports; paused by its user; or being restarted
        finally:
            self._pinging.discard(slot)
        if latency is None:
            self._scheduler.condemn(slot, epoch, "hung")
        elif slot.box.generation == generation:
            self._slowness.observe(slot.box.id, latency)

    def _judge_slowness(self) -> None:
        slots = {slot.box.id: slot for slot in self._scheduler.slots if slot.sandbox is not None}
        self._slowness.keep(slots)
        for verdict in self._slowness.judge(loop_time()):
            slot = slots[verdict.id]
            if verdict.kind == "restore":
                self._scheduler.restore(slot, verdict.reason)
            elif verdict.kind == "eject":
                self._scheduler.eject(slot, verdict.reason)
            else:
                self._scheduler.condemn(slot, slot.epoch, "slow")

    def _measure_host(self) -> None:
        if self._host is not None:
            self.usage = self._host()
            reason = pressure(self.usage, self._policy.watermarks, already=self._pressed)
            self._pressed = reason is not None
            self._scheduler.set_pressure(reason)

    # Commands in idle sandboxes.

    async def _check_idle(self) -> None:
        interval = self._policy.canary_interval
        while True:
            await asyncio.sleep(1.0)
            now = loop_time()
            slots = [slot for slot in self._scheduler.slots if slot.sandbox is not None]
            # Spread over the interval.
            self._next_check = {
                slot: self._next_check.get(slot) or now + interval * self._rng.uniform(0.5, 1) for slot in slots
            }
            checking = sum(slot.state == "checking" for slot in slots)
            for slot in slots:
                # At most a quarter at a time, so that callers can be served meanwhile.
                due = now >= self._next_check[slot] and checking < max(1, len(slots) // 4)
                if due and self._scheduler.begin_check(slot):
                    self._next_check[slot] = now + interval
                    checking += 1
                    tracked(self._check(slot, slot.epoch), self._tasks)

    async def _check(self, slot: Slot, epoch: int) -> None:
        reason = ""
        try:
            for _ in range(self._policy.canary_failures):
                reason = await self._provisioner.check(slot)
                if not reason or slot.epoch != epoch:
                    break
        finally:
            self._scheduler.end_check(slot, epoch, reason)

    # The engine.

    async def _follow_events(self) -> None:
        failures = 0
        while True:
            try:
                async for event in self._provisioner.backend.events():
                    failures = 0
                    slot = self._scheduler.slots.find(event.id)
                    if slot is not None and slot.state in _EXPECTED and event.kind in ("died", "removed", "paused"):
                        tracked(self._inspect(slot, slot.epoch), self._tasks)
            except SandboxError:
                pass  # the engine is unavailable; the next comparison finds what happened to the sandboxes
            failures += 1
            await asyncio.sleep(self._backoff.delay(failures, self._rng))
            await self._reconcile()

    async def _inspect(self, slot: Slot, epoch: int) -> None:
        """Look at the current state of a sandbox that an event is about."""
        began = loop_time()
        try:
            observed = await asyncio.wait_for(self._provisioner.backend.inspect(slot.box.id), LIST_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            return
        self._compare({slot: epoch}, {observed.id: observed}, began)

    async def _reconcile_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._policy.reconcile_interval)
            await self._reconcile()

    async def _reconcile(self) -> None:
        """Compare the slots with what the engine lists: report missing sandboxes and remove strays."""
        epochs = {slot: slot.epoch for slot in self._scheduler.slots if slot.state in _EXPECTED}
        began = loop_time()
        try:
            observed = await asyncio.wait_for(self._provisioner.observe(), LIST_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            return
        self._compare(epochs, {one.id: one for one in observed}, began)
        owned = {slot.box.id for slot in self._scheduler.slots if slot.sandbox is not None}
        self._remove_strays({one.id for one in observed} - owned)

    def _compare(self, epochs: Mapping[Slot, int], observed: Mapping[str, Observed], began: float) -> None:
        """Report slots whose sandbox does not run. ``epochs`` and ``began`` are from before the engine was asked."""
        for slot, epoch in epochs.items():
            state = observed[slot.box.id].state if slot.box.id in observed else "absent"
            if slot.epoch != epoch or state == "running":
                continue
            if state != "paused":
                self._scheduler.lost(slot, "exited" if slot.box.id in observed else "removed")
            elif not slot.paused and not slot.box.was_paused(began):
                self._scheduler.condemn(slot, epoch, "frozen")

    def _remove_strays(self, found: set[str]) -> None:
        """Remove sandboxes without a slot. One may be under creation unless all creations began after it was seen."""
        now = loop_time()
        self._strays = {id: self._strays.get(id, now) for id in found}
        for id, first_seen in self._strays.items():
            if first_seen < min(now, self._provisioner.creating_since):
                tracked(self._provisioner.remove_stray(id), self._tasks)  # if it fails, the next comparison tries again
