"""Faults of pooled sandboxes: cases that run in virtual time, for any seed.

A case breaks one thing at a moment drawn from its seed, and asserts what must follow and by when. The audit of
``simulation.SimulatedPool`` runs in all of them. Numbers are those of the list of faults in the documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest
from simulation import CPUS, SimulatedPool, inject_faults

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
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.testing.faults import Fault

CASES: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {}


def case(function: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[int], Coroutine[Any, Any, None]]:
    CASES[function.__name__] = function
    return function


def idle_ids(sim: SimulatedPool) -> list[str]:
    return [slot.box.id for slot in sim.slots.idle()]


async def until(condition: Callable[[], bool], within: float) -> float:
    """Return the seconds until ``condition`` holds; fail if it does not hold in time."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start <= within, f"not within {within} s"
        await asyncio.sleep(0.01)
    return loop.time() - start


@case
async def case_01_killed_while_idle(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=3, max_size=4) as sim:
        await sim.pool.wait_filled()
        await asyncio.sleep(sim.rng.uniform(0, 40))
        await sim.pool.wait_filled()
        victim = sim.rng.choice(idle_ids(sim))
        sim.backend.die(victim)
        await until(lambda: victim not in sim.backend.boxes, 0.5)
        await until(lambda: len(idle_ids(sim)) == 3, 3.0)
        assert victim not in idle_ids(sim)
        for _ in range(3):
            assert (await sim.acquire()).box.id != victim


@case
async def case_02_killed_during_a_command(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=4) as sim:
        lease, other = await sim.acquire(), await sim.acquire()
        start, after = sim.now(), sim.rng.uniform(0.01, 5)
        asyncio.get_running_loop().call_later(after, sim.backend.die, lease.box.id)
        with pytest.raises(SandboxLost) as caught:
            await lease.box.exec("sleep 100", timeout=200)
        assert caught.value.details["reason"] == "exited"
        assert sim.now() - start - after < 1.0
        assert lease.failure
        assert (await other.box.exec("true")).ok
        sim.release(lease)
        sim.release(other)
        await until(lambda: lease.box.id not in sim.backend.boxes, 1.0)


@case
async def case_04_tainted_by_processes_that_cannot_be_killed(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3) as sim:
        lease, other = await sim.acquire(), await sim.acquire()
        sim.backend.unkillable(lease.box.id)
        result = await lease.box.exec("sleep 1000", timeout=sim.rng.uniform(0.1, 5))
        assert (result.timed_out, result.tainted, lease.failure) == (True, True, "tainted")
        with pytest.raises(SandboxLost, match="tainted"):
            await lease.box.exec("true")
        assert (await other.box.exec("true")).ok
        sim.release(lease)
        sim.release(other)
        await until(lambda: lease.box.id not in sim.backend.boxes, 2.0)
        async with sim.pool.acquire() as box:
            assert box.id != lease.box.id


@case
async def case_08_full_of_processes_while_idle(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=2) as sim:
        await sim.pool.wait_filled()
        victim = sim.rng.choice(idle_ids(sim))
        sim.backend.boxes[victim].process_limit = 0  # the agent answers, but no process can start
        await until(lambda: victim not in sim.backend.boxes, 32.0 + 12.0)
        await until(lambda: len(idle_ids(sim)) == 2, 5.0)


@case
async def case_11_paused_by_others(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=3) as sim:
        sim.backend.losing_events = sim.rng.random() < 0.5
        lease = await sim.acquire()
        await sim.pool.wait_filled()
        idle = sim.rng.choice(idle_ids(sim))
        waiting = asyncio.ensure_future((await lease.box.spawn("sleep 1000", timeout=2000)).wait())
        start = sim.now()
        sim.backend.freeze(idle)
        sim.backend.freeze(lease.box.id)
        found = asyncio.ensure_future(until(lambda: idle not in sim.backend.boxes, 5.0))
        with pytest.raises(SandboxLost) as caught:
            await waiting  # the user gets the error when the pool detects the pause
        assert sim.now() - start <= (5.0 if sim.backend.losing_events else 0.5)
        assert caught.value.details["reason"] == lease.failure
        assert lease.failure in ("hung", "frozen")
        await found
        sim.release(lease)
        await until(lambda: lease.box.id not in sim.backend.boxes, 45.0)


@case
async def case_12_the_agent_hangs(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=2) as sim:
        await sim.pool.wait_filled()
        victim = sim.rng.choice(idle_ids(sim))
        sim.backend.mute(victim)
        if sim.rng.random() < 0.5:  # a caller before the detection does not get it either
            await asyncio.sleep(sim.rng.uniform(0, 5))
            for lease in [await sim.acquire(), await sim.acquire()]:
                assert lease.box.id != victim
                sim.release(lease)
        await until(lambda: victim not in sim.backend.boxes, 60.0)


@case
async def case_13_the_agent_dies(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3) as sim:
        lease = await sim.acquire()
        await sim.pool.wait_filled()
        idle = idle_ids(sim)[0]
        sim.backend.cut(idle)
        await until(lambda: idle not in sim.backend.boxes, 0.1)
        asyncio.get_running_loop().call_later(sim.rng.uniform(0.01, 3), sim.backend.cut, lease.box.id)
        with pytest.raises(SandboxLost) as caught:
            await lease.box.exec("sleep 50", timeout=100)
        assert caught.value.side_effects == "maybe"
        ran = [request for request in sim.backend.boxes[lease.box.id].executed if "sleep 50" in request.argv]
        assert len(ran) == 1  # and was not repeated
        sim.release(lease)


@case
async def case_14_one_of_eight_is_slow(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=8, max_size=8, refill_concurrency=2) as sim:
        await sim.pool.wait_filled()
        slow = sim.rng.sample(idle_ids(sim), sim.rng.randint(1, 4))
        for id in slow:
            sim.backend.slow(id, sim.rng.uniform(0.3, 1.9))
        cap = max(1, 8 // 5)
        await until(lambda: sim.pool.stats().degraded > 0, 21.0)
        for _ in range(200):
            await asyncio.sleep(0.1)
            assert sim.pool.stats().degraded <= cap
        ejected = [box.id for box in sim.pool.sandboxes("degraded")]
        assert all(box.state == "degraded" for box in sim.pool.sandboxes("degraded"))
        assert set(ejected) <= set(slow)
        lease = await sim.acquire()
        assert lease.box.id not in ejected
        sim.release(lease)


@case
async def case_16_the_engine_does_not_answer(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=6) as sim:
        held = [await sim.acquire(), await sim.acquire()]
        await sim.pool.wait_filled()
        sim.backend.engine_down()
        ready = len(idle_ids(sim))
        before = sum(call.op == "create" for call in sim.backend.calls)
        outcomes = await asyncio.gather(*(sim.acquire(timeout=60) for _ in range(ready + 8)), return_exceptions=True)
        assert sum(isinstance(outcome, BreakerOpen) for outcome in outcomes) == 8
        assert sum(call.op == "create" for call in sim.backend.calls) - before <= 10
        start = sim.now()
        with pytest.raises(BreakerOpen):
            await sim.acquire()
        assert sim.now() == start
        for lease in held:  # running sandboxes continue
            assert (await lease.box.exec("true")).ok
        await asyncio.sleep(sim.rng.uniform(1, 60))
        sim.backend.engine_up()
        for lease in [*held, *(outcome for outcome in outcomes if not isinstance(outcome, BaseException))]:
            sim.release(lease)
        await until(lambda: len(idle_ids(sim)) >= 2, 120.0)
        assert sim.pool.stats().breaker == "closed"


@case
async def case_17_the_engine_restarts_and_everything_dies(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=6, max_size=10) as sim:
        held = [await sim.acquire() for _ in range(4)]
        await sim.pool.wait_filled()
        sim.backend.engine_down(kill=True)
        await asyncio.sleep(sim.rng.uniform(0.1, 20))
        for lease in held:
            assert lease.failure
            with pytest.raises(SandboxError):
                await lease.box.exec("true")
            sim.release(lease)
        sim.backend.engine_up()
        await until(lambda: len(idle_ids(sim)) == 6, 120.0)
        assert sim.slots.most_creating <= CPUS
        await until(lambda: len(sim.backend.boxes) == 6, 60.0)


@case
async def case_18_events_are_lost(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=3, max_size=4) as sim:
        await sim.pool.wait_filled()
        sim.backend.losing_events = True
        if sim.rng.random() < 0.5:
            sim.backend.cut_events()
        await asyncio.sleep(sim.rng.uniform(0, 20))
        await sim.pool.wait_filled()
        others = set(idle_ids(sim))
        victim = sim.rng.choice(sorted(others))
        # It dies without an event, and its connection stays open.
        box = sim.backend.boxes[victim]
        box.exit_code, box.channels = 137, []
        await until(lambda: victim not in sim.backend.boxes, 17.0)
        await sim.pool.wait_filled()
        assert others - {victim} <= set(sim.backend.boxes)  # running sandboxes are not touched


@case
async def case_18b_strays_are_removed_but_not_creations_under_way(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=4) as sim:
        await sim.pool.wait_filled()
        labels = dict(sim.backend.boxes[idle_ids(sim)[0]].labels)
        stray = "ak-" + "5" * 16
        await sim.backend.create(stray, sim.pool.spec, labels)
        foreign = "ak-" + "6" * 16
        await sim.backend.create(foreign, sim.pool.spec, {"agentkit.managed": "1"})
        sim.backend.inject(Fault("create", "slow", phase="ready", seconds=sim.rng.uniform(1, 50)))
        lease = await sim.acquire()
        slow = asyncio.ensure_future(sim.acquire())
        await until(lambda: stray not in sim.backend.boxes, 120.0)
        sim.release(await slow)
        sim.release(lease)
        assert foreign in sim.backend.boxes
        await sim.backend.remove(foreign)


@case
async def case_19_creation_fails_or_is_cancelled_anywhere(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=0, max_size=3, on_exhausted="create" if seed % 2 else "wait") as sim:
        for phase in ("pull", "create", "start", "ready"):
            does: Literal["fail", "hang", "slow"] = sim.rng.choice(["fail", "hang", "slow"])
            if phase != "pull" or does == "slow":
                sim.backend.inject(Fault("create", does, phase=phase, seconds=5, times=2, probability=0.7))
        takers = [asyncio.ensure_future(sim.acquire(timeout=200)) for _ in range(6)]
        for taker in takers:
            if sim.rng.random() < 0.5:
                asyncio.get_running_loop().call_later(sim.rng.uniform(0, 1), taker.cancel)
        while pending := [taker for taker in takers if not taker.done()]:
            await asyncio.wait(pending, timeout=5)
            for taker in takers:
                if taker.done() and not taker.cancelled() and taker.exception() is None:
                    lease = taker.result()
                    if lease.box.id in sim.holders:
                        sim.release(lease)
        for taker in takers:
            if not taker.cancelled() and (error := taker.exception()) is not None:
                assert isinstance(error, BreakerOpen | PoolExhausted | StartTimeout | EngineUnavailable), error


@case
async def case_20_the_image_is_missing(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3) as sim:
        fault = sim.backend.inject(Fault("create", "fail", phase="pull", times=None))
        start = sim.now()
        takers = await asyncio.gather(*(sim.acquire() for _ in range(5)), return_exceptions=True)
        assert all(isinstance(taker, ImageError) for taker in takers)
        assert sim.now() - start < 5.0
        assert sim.pool.stats().breaker == "closed"  # not a fault of the engine
        sim.backend.rules.faults.remove(fault)
        await asyncio.sleep(sim.rng.uniform(0, 10))
        await until(lambda: len(idle_ids(sim)) == 1, 40.0)


@case
async def case_22_crash_loop(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=3, max_size=5) as sim:

        async def crash_all() -> None:
            while True:
                await asyncio.sleep(0.2)
                for id, box in list(sim.backend.boxes.items()):
                    if box.exit_code is None and sim.now() - box.created > 0.5:
                        sim.backend.die(id)

        crashing = asyncio.ensure_future(crash_all())
        await asyncio.sleep(60)
        first = sum(call.op == "create" for call in sim.backend.calls)
        await asyncio.sleep(120)
        later = sum(call.op == "create" for call in sim.backend.calls) - first
        assert first <= 2 * 3 + 4, first  # two rounds of all, then one at a time
        assert later <= 2 * 4, later
        assert sim.breaker.opened == 0  # the engine has no fault
        await until(lambda: sim.pool.stats().retry_after > 5, 60.0)
        start = sim.now()
        with pytest.raises(PoolExhausted, match=r"died at once, the last: ak-.* died .* after its creation: exited"):
            await sim.acquire()
        assert sim.now() == start
        crashing.cancel()
        await asyncio.wait({crashing})
        await until(lambda: len(idle_ids(sim)) == 3, 120.0)


@case
async def all_idle_sandboxes_die_at_once(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=4, max_size=8) as sim:
        for age in (sim.rng.uniform(0, 9), sim.rng.uniform(11, 30)):
            await sim.pool.wait_filled()
            await asyncio.sleep(age)
            for id in idle_ids(sim):
                sim.backend.die(id)
            start = sim.now()
            sim.release(await sim.acquire(timeout=2))
            await until(lambda: len(idle_ids(sim)) == 4, 3.0 - (sim.now() - start))
            assert sim.breaker.opened == 0


@case
async def case_23_storm(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=2, max_size=8) as sim:
        takers = [
            asyncio.ensure_future(sim.use(sim.rng.expovariate(5.0), sim.rng.choice([1.0, 10.0, 60.0])))
            for _ in range(200)
        ]
        for taker in sim.rng.sample(takers, 40):
            asyncio.get_running_loop().call_later(sim.rng.uniform(0, 5), taker.cancel)
        breaking = asyncio.ensure_future(inject_faults(sim, sim.now() + 20))
        results = await asyncio.gather(*takers, return_exceptions=True)
        for result in results:
            assert result is None or isinstance(result, asyncio.CancelledError), result
        assert sum(sim.outcomes.values()) + sum(result is not None for result in results) == 200
        await breaking
        counters = sim.pool.stats().counters
        assert counters.acquired >= sim.outcomes.get("served", 0)


@case
async def hedged_creation(seed: int) -> None:
    hedge = Hedge(budget=0.2)
    async with SimulatedPool(seed, min_idle=1, max_size=4, hedge=hedge) as sim:
        for number in range(60):
            if number > 30 and sim.rng.random() < 0.2:
                sim.backend.inject(Fault("create", "slow", phase="start", seconds=20))
            sim.release(await sim.acquire())
            await asyncio.sleep(0.5)
        assert hedge.counts.hedged <= 0.2 * hedge.counts.calls


@case
async def close_waits_for_sandboxes_in_use_up_to_a_limit(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3, drain_timeout=10) as sim:
        lease, other = await sim.acquire(), await sim.acquire()
        waiting = [asyncio.ensure_future(sim.acquire()) for _ in range(5)]
        await asyncio.sleep(sim.rng.choice([0, 0.05, 0.5]))
        kept = any(one.done() for one in waiting)  # a third sandbox was created in time and is not released
        start, back = sim.now(), sim.rng.uniform(0, 20)
        asyncio.get_running_loop().call_later(back, sim.release, lease)
        asyncio.get_running_loop().call_later(back / 2, sim.release, other)
        closing = asyncio.ensure_future(sim.pool.close())
        if seed % 3 == 0:
            asyncio.get_running_loop().call_later(5, closing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        assert sim.now() - start <= (5 if seed % 3 == 0 else 10 if kept else min(10, back)) + 3
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(one, BaseException):
                sim.holders.clear()
            else:
                assert isinstance(one, PoolClosed)
        with pytest.raises(PoolClosed):
            await sim.acquire()
        await asyncio.sleep(max(0.0, back - (sim.now() - start)) + 0.1)
