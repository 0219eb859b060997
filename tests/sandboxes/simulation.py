"""A pool whose changes of state and acquisitions are all checked, in virtual time.

Run one seed again with ``python tests/sandboxes/simulation.py SEED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Coroutine
from typing import Any

from agentkit.errors import BreakerOpen, PoolClosed, PoolExhausted, SandboxError
from agentkit.sandboxes.pool.breaker import Breaker
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.pool.slots import COUNTED, Slot, Slots, SlotState
from agentkit.sandboxes.pool.waiters import WaitQueue
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import Command, FakeBackend, FakeFile

CPUS = max(2, os.cpu_count() or 2)


async def append(command: Command, name: str, line: str, seconds: str = "0") -> None:
    """Append a line to a file of the working directory, then take some time."""
    await command.sleep()
    path = f"{command.request.cwd}/{name}"
    before = command.box.files.get(path, FakeFile()).data
    command.box.files[path] = FakeFile(before + f"{line}\n".encode())
    await command.sleep(float(seconds))


async def cat(command: Command, name: str) -> None:
    """Print a file of the working directory."""
    await command.write(command.box.files[f"{command.request.cwd}/{name}"].data)


async def ls(command: Command) -> None:
    """Print the files of the working directory."""
    await command.sleep()
    for path in sorted(command.box.files):
        if path.startswith(f"{command.request.cwd}/"):
            await command.write(f"{path}\n")


async def identify(command: Command, name: str) -> None:
    """Write a text to a file that differs between sandboxes and over time."""
    await append(command, name, f"{command.box.id} {asyncio.get_running_loop().time()}")


COMMANDS = {"append": append, "cat": cat, "identify": identify, "ls": ls}


class AuditedSlots(Slots):
    """Slots that recount their states after every change."""

    creating_allowed = CPUS
    most_creating = 0

    def move(self, slot: Slot, state: SlotState) -> None:
        super().move(slot, state)
        self.audit()

    def open(self, *, extra: bool = False) -> Slot:
        slot = super().open(extra=extra)
        self.audit()
        return slot

    def audit(self) -> None:
        slots = list(self)
        for state in COUNTED:
            assert self.count(state) == sum(one.state == state and not one.extra for one in slots), state
        assert self.extra == sum(one.extra and one.state in COUNTED for one in slots)
        assert self.size <= self.max_size
        creating = sum(one.state == "creating" and not one.extra for one in slots)
        assert creating <= self.creating_allowed, f"{creating} creations at once"
        self.most_creating = max(self.most_creating, creating)
        # At most a fifth is set aside, or one.
        assert self.count("degraded") <= max(1, len(slots) // 5 + 1)
        ids = [one.sandbox.id for one in slots if one.sandbox is not None]
        assert len(ids) == len(set(ids))


class AuditedQueue(WaitQueue):
    """Checks that callers are served in order of arrival."""

    def serve(self, slot: Slot) -> None:
        assert self._waiters[0][0] == min(ticket for ticket, _ in self._waiters)
        assert slot.state == "busy"
        super().serve(slot)


class SimulatedPool:
    """A fake engine, a pool on it, and the sandboxes that are in use."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.backend = FakeBackend(seed=seed, commands=COMMANDS)
        self.breaker = Breaker("the fake engine", time=asyncio.get_running_loop().time)
        self.pool = SandboxPool(backend=self.backend, breaker=self.breaker, seed=seed, **settings)
        self.holders: dict[str, int] = {}
        self.acquired = 0
        self.outcomes: dict[str, int] = {}
        # A caller of an extra sandbox gets any error of its creation.
        self.refusals = (
            SandboxError if settings.get("on_exhausted") == "create" else (PoolExhausted, BreakerOpen, PoolClosed)
        )

    async def __aenter__(self) -> SimulatedPool:
        await self.pool.start()
        scheduler = self.pool.scheduler
        scheduler.slots = self.slots = AuditedSlots(scheduler.slots.max_size, self.now)
        scheduler.waiters = AuditedQueue()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.backend.engine_up()
        await self.pool.close()
        if error[0] is None:
            assert self.backend.boxes == {}, "leaked"
            assert self.slots.size == self.slots.extra == len(list(self.slots)) == 0
            assert self.pool.stats().counters.left_behind == 0
            leftover = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not leftover, leftover

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def acquire(self, timeout: float | None = None) -> Lease:
        lease = await self.pool.acquire(timeout)
        box = self.backend.boxes.get(lease.box.id)
        # Between the last check and the return no time passes.
        assert box is not None, "handed out a removed one"
        assert box.exit_code is None, "handed out a dead one"
        assert not box.paused, "handed out a frozen one"
        assert lease.box.loss is None, f"handed out a lost one: {lease.box.loss}"
        assert lease.box.id not in self.holders, "handed out twice"
        self.acquired += 1
        self.holders[lease.box.id] = self.acquired
        return lease

    def release(self, lease: Lease, *, discard: bool = False) -> None:
        del self.holders[lease.box.id]
        lease.release(discard=discard)

    async def use(self, hold: float, timeout: float, work: bool = True) -> None:
        """Acquire a sandbox, work in it and release it; any unexpected error fails the test."""
        start = self.now()
        try:
            lease = await self.acquire(timeout)
        except self.refusals as error:
            self._count(type(error).__name__)
            assert self.now() - start <= timeout + 2.5
            return
        try:
            await asyncio.sleep(hold)
            if work:
                await lease.box.exec(["true"], timeout=5)
            self._count("served")
        except SandboxError as error:
            self._count(type(error).__name__)
        finally:
            self.release(lease, discard=self.rng.random() < 0.1)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def play(scenario: Coroutine[Any, Any, Any], seed: int) -> Any:
    """Run a scenario in virtual time; a failure names its seed."""
    try:
        return virtual_time.run(scenario, limit=100_000)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


FAULTS = ("oom", "freeze", "mute", "cut", "slow", "forget", "engine", "events", "lost events")


async def inject_faults(sim: SimulatedPool, until: float) -> None:
    """Inject random faults."""
    rng, backend = sim.rng, sim.backend
    while sim.now() < until:
        await asyncio.sleep(rng.expovariate(1.0))
        running = [id for id, box in backend.boxes.items() if box.exit_code is None]
        kind = rng.choice(["die", "die", *FAULTS])
        if kind == "engine" and rng.random() < 0.3:
            backend.engine_down(kill=rng.random() < 0.5)
            await asyncio.sleep(rng.uniform(0.1, 20))
            backend.engine_up()
        elif kind == "events":
            backend.cut_events()
        elif kind == "lost events":
            backend.losing_events = not backend.losing_events
        elif running and kind == "slow":
            backend.slow(rng.choice(running), rng.uniform(0.1, 3))
        elif running and kind != "engine":
            with contextlib.suppress(KeyError):
                getattr(backend, kind)(rng.choice(running))
    backend.losing_events = False


async def random_load(seed: int) -> SimulatedPool:
    """Many callers, few sandboxes, and random faults."""
    rng = random.Random(seed)
    max_size = rng.randint(1, 8)
    reuse = rng.choice([None, None, "snapshot"])
    sim = SimulatedPool(
        seed,
        min_idle=rng.randint(0, max_size),
        max_size=max_size,
        warm=rng.choice(["running", "running", "paused"]),
        on_exhausted=rng.choice(["wait", "wait", "wait", "fail", "create"]),
        **({"max_uses": rng.randint(2, 5), "reset": reuse} if reuse else {}),
    )
    async with sim:
        callers = []
        for _ in range(rng.randint(5, 40)):
            work = sim.use(rng.expovariate(1.0), rng.choice([0.0, 1.0, 5.0, 60.0]))
            callers.append(asyncio.ensure_future(work))
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.uniform(0, 10), callers[-1].cancel)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.expovariate(2.0))
        breaking = asyncio.ensure_future(inject_faults(sim, sim.now() + 20))
        results = await asyncio.gather(*callers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        await breaking
    return sim


if __name__ == "__main__":
    print(play(random_load(int(sys.argv[1])), int(sys.argv[1])).outcomes)
