"""What may go wrong with pooled sandboxes, case by case: each is played in virtual time, for any seed.

A case breaks one thing at a moment drawn from its seed, and asserts what must follow and by when. The audit of
``simulation.World`` runs in all of them. Numbers are those of the list of faults in the documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
from simulation import CPUS, World, nemesis

from agentkit.errors import (
    BreakerOpen,
    EngineUnavailable,
    ImageError,
    PoolClosed,
    PoolExhausted,
    SandboxError,
    SandboxLost,
    StartTimeout,
)
from agentkit.sandboxes.backends.fake import Fault
from agentkit.sandboxes.hedge import Hedge

CASES: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {}


def case(function: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[int], Coroutine[Any, Any, None]]:
    CASES[function.__name__] = function
    return function


def idle_ids(world: World) -> list[str]:
    return [place.box.id for place in world.stock.ledger.idle()]


async def until(condition: Callable[[], bool], within: float) -> float:
    """Seconds until ``condition`` holds; a failure if it does not in time."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start <= within, f"not within {within} s"
        await asyncio.sleep(0.01)
    return loop.time() - start


@case
async def case_01_killed_while_idle(seed: int) -> None:
    async with World(seed, min_idle=3, max_size=4) as world:
        await world.pool.filled()
        await asyncio.sleep(world.rng.uniform(0, 40))
        await world.pool.filled()
        victim = world.rng.choice(idle_ids(world))
        world.backend.die(victim)
        await until(lambda: victim not in world.backend.boxes, 0.5)
        await until(lambda: len(idle_ids(world)) == 3, 3.0)
        assert victim not in idle_ids(world)
        for _ in range(3):
            assert (await world.take()).box.id != victim


@case
async def case_02_killed_while_it_works(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=4) as world:
        lease, other = await world.take(), await world.take()
        start, after = world.now(), world.rng.uniform(0.01, 5)
        asyncio.get_running_loop().call_later(after, world.backend.die, lease.box.id)
        with pytest.raises(SandboxLost) as caught:
            await lease.box.exec("sleep 100", timeout=200)
        assert caught.value.details["reason"] == "exited"
        assert world.now() - start - after < 1.0
        assert lease.ill
        assert (await other.box.exec("true")).ok
        world.give(lease)
        world.give(other)
        await until(lambda: lease.box.id not in world.backend.boxes, 1.0)


@case
async def case_04_tainted_by_what_nobody_can_kill(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world:
        lease, other = await world.take(), await world.take()
        world.backend.unkillable(lease.box.id)
        result = await lease.box.exec("setsid sleep 1000", timeout=world.rng.uniform(0.1, 5))
        assert (result.timed_out, result.tainted, lease.ill) == (True, True, "tainted")
        with pytest.raises(SandboxLost, match="tainted"):
            await lease.box.exec("true")
        assert (await other.box.exec("true")).ok
        world.give(lease)
        world.give(other)
        await until(lambda: lease.box.id not in world.backend.boxes, 2.0)
        async with world.pool.acquire() as box:
            assert box.id != lease.box.id


@case
async def case_08_full_of_processes_while_idle(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=2) as world:
        await world.pool.filled()
        victim = world.rng.choice(idle_ids(world))
        world.backend.boxes[victim].machine.pids = 0  # nothing can be started any more, though the agent answers
        await until(lambda: victim not in world.backend.boxes, 32.0 + 12.0)
        await until(lambda: len(idle_ids(world)) == 2, 5.0)


@case
async def case_11_frozen_behind_our_back(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=3) as world:
        world.backend.losing_events = world.rng.random() < 0.5
        lease = await world.take()
        await world.pool.filled()
        idle = world.rng.choice(idle_ids(world))
        waiting = asyncio.ensure_future((await lease.box.spawn("sleep 1000", timeout=2000)).wait())
        start = world.now()
        world.backend.freeze(idle)
        world.backend.freeze(lease.box.id)
        found = asyncio.ensure_future(until(lambda: idle not in world.backend.boxes, 5.0))
        with pytest.raises(SandboxLost) as caught:
            await waiting  # who uses it learns of it when the pool does
        assert world.now() - start <= (5.0 if world.backend.losing_events else 0.5)
        assert caught.value.details["reason"] == lease.ill
        assert lease.ill in ("hung", "frozen")
        await found
        world.give(lease)
        await until(lambda: lease.box.id not in world.backend.boxes, 45.0)


@case
async def case_12_the_agent_hangs(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=2) as world:
        await world.pool.filled()
        victim = world.rng.choice(idle_ids(world))
        world.backend.mute(victim)
        if world.rng.random() < 0.5:  # somebody comes before it is found out: never handed out all the same
            await asyncio.sleep(world.rng.uniform(0, 5))
            for lease in [await world.take(), await world.take()]:
                assert lease.box.id != victim
                world.give(lease)
        await until(lambda: victim not in world.backend.boxes, 60.0)


@case
async def case_13_the_agent_dies(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world:
        lease = await world.take()
        await world.pool.filled()
        idle = idle_ids(world)[0]
        world.backend.cut(idle)
        await until(lambda: idle not in world.backend.boxes, 0.1)
        asyncio.get_running_loop().call_later(world.rng.uniform(0.01, 3), world.backend.cut, lease.box.id)
        with pytest.raises(SandboxLost) as caught:
            await lease.box.exec("sleep 50", timeout=100)
        assert caught.value.side_effects == "maybe"
        ran = [request for request in world.backend.boxes[lease.box.id].executed if "sleep 50" in request.argv]
        assert len(ran) == 1  # and never again
        world.give(lease)


@case
async def case_14_one_of_eight_is_slow(seed: int) -> None:
    async with World(seed, min_idle=8, max_size=8, refill_concurrency=2) as world:
        await world.pool.filled()
        slow = world.rng.sample(idle_ids(world), world.rng.randint(1, 4))
        for id in slow:
            world.backend.slow(id, world.rng.uniform(0.3, 1.9))
        cap = max(1, 8 // 5)
        await until(lambda: world.pool.stats().degraded > 0, 21.0)
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert world.pool.stats().degraded <= cap
        ejected = [place.box.id for place in world.stock.ledger if place.state == "degraded"]
        assert all(place.box.state == "degraded" for place in world.stock.ledger if place.state == "degraded")
        assert set(ejected) <= set(slow)
        lease = await world.take()
        assert lease.box.id not in ejected
        world.give(lease)


@case
async def case_16_the_engine_does_not_answer(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=6) as world:
        held = [await world.take(), await world.take()]
        await world.pool.filled()
        world.backend.engine_down()
        ready = len(idle_ids(world))
        before = sum(call.op == "create" for call in world.backend.calls)
        outcomes = await asyncio.gather(*(world.take(timeout=60) for _ in range(ready + 8)), return_exceptions=True)
        assert sum(isinstance(outcome, BreakerOpen) for outcome in outcomes) == 8
        assert sum(call.op == "create" for call in world.backend.calls) - before <= 10
        start = world.now()
        with pytest.raises(BreakerOpen):
            await world.take()
        assert world.now() == start
        for lease in held:  # what runs, runs on
            assert (await lease.box.exec("true")).ok
        await asyncio.sleep(world.rng.uniform(1, 60))
        world.backend.engine_up()
        for lease in [*held, *(outcome for outcome in outcomes if not isinstance(outcome, BaseException))]:
            world.give(lease)
        await until(lambda: len(idle_ids(world)) >= 2, 120.0)
        assert world.pool.stats().breaker == "closed"


@case
async def case_17_the_engine_restarts_and_everything_dies(seed: int) -> None:
    async with World(seed, min_idle=6, max_size=10) as world:
        held = [await world.take() for _ in range(4)]
        await world.pool.filled()
        world.backend.engine_down(kill=True)
        await asyncio.sleep(world.rng.uniform(0.1, 20))
        for lease in held:
            assert lease.ill
            with pytest.raises(SandboxError):
                await lease.box.exec("true")
            world.give(lease)
        world.backend.engine_up()
        await until(lambda: len(idle_ids(world)) == 6, 120.0)
        assert world.ledger.most_creating <= CPUS
        await until(lambda: len(world.backend.boxes) == 6, 60.0)


@case
async def case_18_events_are_lost(seed: int) -> None:
    async with World(seed, min_idle=3, max_size=4) as world:
        await world.pool.filled()
        world.backend.losing_events = True
        if world.rng.random() < 0.5:
            world.backend.cut_events()
        await asyncio.sleep(world.rng.uniform(0, 20))
        await world.pool.filled()
        others = set(idle_ids(world))
        victim = world.rng.choice(sorted(others))
        # Dead without a word: neither an event nor the end of the connection.
        box = world.backend.boxes[victim]
        box.exit_code, box.channels = 137, []
        await until(lambda: victim not in world.backend.boxes, 17.0)
        await world.pool.filled()
        assert others - {victim} <= set(world.backend.boxes)  # none of the living was touched


@case
async def case_18b_strays_are_removed_and_those_being_made_are_not(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=4) as world:
        await world.pool.filled()
        labels = dict(world.backend.boxes[idle_ids(world)[0]].labels)
        stray = "ak-" + "5" * 16
        await world.backend.create(stray, world.pool.spec, labels)
        foreign = "ak-" + "6" * 16
        await world.backend.create(foreign, world.pool.spec, {"agentkit.managed": "1"})
        world.backend.inject(Fault("create", "slow", phase="ready", seconds=world.rng.uniform(1, 50)))
        lease = await world.take()
        slow = asyncio.ensure_future(world.take())
        await until(lambda: stray not in world.backend.boxes, 120.0)
        world.give(await slow)
        world.give(lease)
        assert foreign in world.backend.boxes
        await world.backend.remove(foreign)


@case
async def case_19_creation_fails_or_is_cancelled_anywhere(seed: int) -> None:
    async with World(seed, min_idle=0, max_size=3, on_exhausted="create" if seed % 2 else "wait") as world:
        for phase in ("pull", "create", "start", "ready"):
            does: Literal["fail", "hang", "slow"] = world.rng.choice(["fail", "hang", "slow"])
            if phase != "pull" or does == "slow":
                world.backend.inject(Fault("create", does, phase=phase, seconds=5, times=2, probability=0.7))
        takers = [asyncio.ensure_future(world.take(timeout=200)) for _ in range(6)]
        for taker in takers:
            if world.rng.random() < 0.5:
                asyncio.get_running_loop().call_later(world.rng.uniform(0, 1), taker.cancel)
        while pending := [taker for taker in takers if not taker.done()]:
            await asyncio.wait(pending, timeout=5)
            for taker in takers:
                if taker.done() and not taker.cancelled() and taker.exception() is None:
                    lease = taker.result()
                    if lease.box.id in world.holders:
                        world.give(lease)
        for taker in takers:
            if not taker.cancelled() and (error := taker.exception()) is not None:
                assert isinstance(error, BreakerOpen | PoolExhausted | StartTimeout | EngineUnavailable), error


@case
async def case_20_the_image_is_missing(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world:
        fault = world.backend.inject(Fault("create", "fail", phase="pull", times=None))
        start = world.now()
        takers = await asyncio.gather(*(world.take() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(taker, ImageError) for taker in takers)
        assert world.now() - start < 5.0
        assert world.pool.stats().breaker == "closed"  # it is not the engine's fault
        world.backend.script.faults.remove(fault)
        await asyncio.sleep(world.rng.uniform(0, 10))
        await until(lambda: len(idle_ids(world)) == 1, 40.0)


@case
async def case_22_crash_loop(seed: int) -> None:
    async with World(seed, min_idle=3, max_size=5) as world:

        async def crash_all() -> None:
            while True:
                await asyncio.sleep(0.2)
                for id, box in list(world.backend.boxes.items()):
                    if box.exit_code is None and world.now() - box.created > 0.5:
                        world.backend.die(id)

        crashing = asyncio.ensure_future(crash_all())
        await asyncio.sleep(60)
        first = sum(call.op == "create" for call in world.backend.calls)
        await asyncio.sleep(120)
        later = sum(call.op == "create" for call in world.backend.calls) - first
        assert first <= 2 * 3 + 4, first  # two rounds of all, then one at a time
        assert later <= 2 * 4, later
        assert world.stock.breaker.opened == 0  # the engine is well
        await until(lambda: world.stock.failures.not_before - world.now() > 5, 60.0)
        start = world.now()
        with pytest.raises(PoolExhausted, match=r"died at once, the last: ak-.* died .* after it was made: exited"):
            await world.take()
        assert world.now() == start
        crashing.cancel()
        await asyncio.wait({crashing})
        await until(lambda: len(idle_ids(world)) == 3, 120.0)


@case
async def all_that_is_warm_dies_at_once(seed: int) -> None:
    async with World(seed, min_idle=4, max_size=8) as world:
        for age in (world.rng.uniform(0, 9), world.rng.uniform(11, 30)):
            await world.pool.filled()
            await asyncio.sleep(age)
            for id in idle_ids(world):
                world.backend.die(id)
            start = world.now()
            world.give(await world.take(timeout=2))
            await until(lambda: len(idle_ids(world)) == 4, 3.0 - (world.now() - start))
            assert world.stock.breaker.opened == 0


@case
async def case_23_storm(seed: int) -> None:
    async with World(seed, min_idle=2, max_size=8) as world:
        takers = [
            asyncio.ensure_future(world.customer(world.rng.expovariate(5.0), world.rng.choice([1.0, 10.0, 60.0])))
            for _ in range(200)
        ]
        for taker in world.rng.sample(takers, 40):
            asyncio.get_running_loop().call_later(world.rng.uniform(0, 5), taker.cancel)
        breaking = asyncio.ensure_future(nemesis(world, world.now() + 20))
        results = await asyncio.gather(*takers, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, asyncio.CancelledError), result
        assert sum(world.outcomes.values()) + sum(result is not None for result in results) == 200
        await breaking
        counters = world.pool.stats().counters
        assert counters.acquired >= world.outcomes.get("served", 0)


@case
async def hedged_creation(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=4, hedge=Hedge(budget=0.2)) as world:
        for number in range(60):
            if number > 30 and world.rng.random() < 0.2:
                world.backend.inject(Fault("create", "slow", phase="start", seconds=20))
            world.give(await world.take())
            await asyncio.sleep(0.5)
        hedge = world.pool._hedge
        assert hedge is not None
        assert hedge.counts.hedged <= 0.2 * hedge.counts.calls


@case
async def closing_waits_for_those_in_use_and_not_for_ever(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3, drain_timeout=10) as world:
        lease, other = await world.take(), await world.take()
        waiting = [asyncio.ensure_future(world.take()) for _ in range(5)]
        await asyncio.sleep(world.rng.choice([0, 0.05, 0.5]))
        kept = any(one.done() for one in waiting)  # a third one was made in time, and nobody gives it back
        start, back = world.now(), world.rng.uniform(0, 20)
        asyncio.get_running_loop().call_later(back, world.give, lease)
        asyncio.get_running_loop().call_later(back / 2, world.give, other)
        closing = asyncio.ensure_future(world.pool.close())
        if seed % 3 == 0:
            asyncio.get_running_loop().call_later(5, closing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        assert world.now() - start <= (5 if seed % 3 == 0 else 10 if kept else min(10, back)) + 3
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(one, BaseException):
                world.holders.clear()
            else:
                assert isinstance(one, PoolClosed)
        with pytest.raises(PoolClosed):
            await world.take()
        await asyncio.sleep(max(0.0, back - (world.now() - start)) + 0.1)
