"""A pool under audit: every change of its books is checked, and every hand-out.

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
from agentkit.sandboxes.backends import virtual_time
from agentkit.sandboxes.backends.fake import FakeBackend
from agentkit.sandboxes.ledger import COUNTED, Ledger, Line, Place
from agentkit.sandboxes.pool import Lease, SandboxPool

CPUS = max(2, os.cpu_count() or 2)


class AuditedLedger(Ledger):
    """Recounts after every change."""

    creating_allowed = CPUS
    most_creating = 0

    def move(self, place, state, now) -> None:  # type: ignore[no-untyped-def]
        super().move(place, state, now)
        self.audit()

    def open(self, now, *, extra=False):  # type: ignore[no-untyped-def]
        place = super().open(now, extra=extra)
        self.audit()
        return place

    def audit(self) -> None:
        places = list(self)
        for state in COUNTED:
            assert self.count(state) == sum(one.state == state and not one.extra for one in places), state
        assert self.extra == sum(one.extra and one.state in COUNTED for one in places)
        assert self.size <= self.max_size
        creating = sum(one.state == "creating" and not one.extra for one in places)
        assert creating <= self.creating_allowed, f"{creating} creations at once"
        self.most_creating = max(self.most_creating, creating)
        # The set aside ones are few: a fifth of all, or one.
        assert self.count("degraded") <= max(1, len(places) // 5 + 1)
        ids = [one.sandbox.id for one in places if one.sandbox is not None]
        assert len(ids) == len(set(ids))


class AuditedLine(Line):
    """Nobody is served before somebody who came earlier."""

    def serve(self, place: Place) -> None:
        assert self.first().ticket == min(waiter.ticket for waiter in self._waiters)
        assert place.state == "busy"
        super().serve(place)


class World:
    """A fake engine, a pool on it, and who holds what."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.backend = FakeBackend(seed=seed)
        self.pool = SandboxPool(backend=self.backend, seed=seed, **settings)
        self.holders: dict[str, int] = {}
        self.customers = 0
        self.outcomes: dict[str, int] = {}
        # Who gets an extra one waits for nobody, and hears of whatever befalls its creation.
        self.refusals = (
            SandboxError if settings.get("on_exhausted") == "create" else (PoolExhausted, BreakerOpen, PoolClosed)
        )

    async def __aenter__(self) -> World:
        await self.pool.start()
        stock = self.pool._stock
        assert stock is not None
        stock.ledger = self.ledger = AuditedLedger(stock.settings.max_size)
        stock.line = AuditedLine()
        self.stock = stock
        return self

    async def __aexit__(self, *error: object) -> None:
        self.backend.engine_up()
        await self.pool.close()
        if error[0] is None:
            assert self.backend.boxes == {}, "leaked"
            assert self.stock.ledger.size == self.stock.ledger.extra == len(list(self.stock.ledger)) == 0
            assert self.stock.counters.left_behind == 0
            leftover = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not leftover, leftover

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def take(self, timeout: float | None = None) -> Lease:
        lease = await self.pool.take(timeout)
        box = self.backend.boxes.get(lease.box.id)
        # A death between the last look and the return can only be one of this very instant.
        assert box is not None, "handed out a removed one"
        assert box.exit_code is None, "handed out a dead one"
        assert not box.paused, "handed out a frozen one"
        assert lease.box.loss is None, f"handed out a lost one: {lease.box.loss}"
        assert lease.box.id not in self.holders, "handed out twice"
        self.customers += 1
        self.holders[lease.box.id] = self.customers
        return lease

    def give(self, lease: Lease, *, discard: bool = False) -> None:
        del self.holders[lease.box.id]
        lease.release(discard=discard)

    async def customer(self, hold: float, timeout: float, work: bool = True) -> None:
        """Takes one, works with it, gives it back; every ending but the expected ones is a failure of the test."""
        start = self.now()
        try:
            lease = await self.take(timeout)
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
            self.give(lease, discard=self.rng.random() < 0.1)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def play(scenario: Coroutine[Any, Any, Any], seed: int) -> Any:
    """Run it in virtual time; a failure names its seed."""
    try:
        return virtual_time.run(scenario, limit=100_000)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


async def nemesis(world: World, until: float) -> None:
    """Breaks things at random."""
    rng, backend = world.rng, world.backend
    while world.now() < until:
        await asyncio.sleep(rng.expovariate(1.0))
        running = [id for id, box in backend.boxes.items() if box.exit_code is None]
        kind = rng.choice(["die", "die", "oom", "freeze", "mute", "cut", "slow", "forget", "engine", "events", "deaf"])
        if kind == "engine" and rng.random() < 0.3:
            backend.engine_down(kill=rng.random() < 0.5)
            await asyncio.sleep(rng.uniform(0.1, 20))
            backend.engine_up()
        elif kind == "events":
            backend.cut_events()
        elif kind == "deaf":
            backend.losing_events = not backend.losing_events
        elif running and kind == "slow":
            backend.slow(rng.choice(running), rng.uniform(0.1, 3))
        elif running and kind != "engine":
            with contextlib.suppress(KeyError):
                getattr(backend, kind)(rng.choice(running))
    backend.losing_events = False


async def storm(seed: int) -> World:
    """Many customers, few sandboxes, and everything breaks."""
    rng = random.Random(seed)
    max_size = rng.randint(1, 8)
    reuse = rng.choice([None, None, "snapshot"])
    world = World(
        seed,
        min_idle=rng.randint(0, max_size),
        max_size=max_size,
        warm=rng.choice(["running", "running", "paused"]),
        on_exhausted=rng.choice(["wait", "wait", "wait", "fail", "create"]),
        **({"max_uses": rng.randint(2, 5), "reset": reuse} if reuse else {}),
    )
    async with world:
        customers = []
        for _ in range(rng.randint(5, 40)):
            work = world.customer(rng.expovariate(1.0), rng.choice([0.0, 1.0, 5.0, 60.0]))
            customers.append(asyncio.ensure_future(work))
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.uniform(0, 10), customers[-1].cancel)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.expovariate(2.0))
        breaking = asyncio.ensure_future(nemesis(world, world.now() + 20))
        results = await asyncio.gather(*customers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        await breaking
    return world


if __name__ == "__main__":
    print(play(storm(int(sys.argv[1])), int(sys.argv[1])).outcomes)
