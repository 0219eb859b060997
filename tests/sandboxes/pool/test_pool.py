"""Simulations of the pool with all of its faults, for many seeds, in virtual time. A failure names its seed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import simulation
from pool_cases import CASES, until
from seeds import over_all_seeds
from simulation import SimulatedPool, play, random_load

from agentkit.errors import ConfigError, PoolClosed, PoolExhausted
from agentkit.sandboxes.pool.health import HealthPolicy, HostUsage
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.sandboxes.testing.faults import Fault

NUMBERED = [
    pytest.param(name, marks=[pytest.mark.fault(int(name[5:7]))] if name.startswith("case_") else []) for name in CASES
]


@pytest.mark.parametrize("name", NUMBERED)
def test_case(name):
    for seed in range(5 if "storm" not in name else 2):
        play(CASES[name](seed), seed)


@over_all_seeds
@pytest.mark.parametrize("name", NUMBERED)
def test_case_over_all_seeds(name, seeds):
    for seed in seeds:
        play(CASES[name](seed), seed)


def test_random_faults():
    for seed in range(30):
        play(random_load(seed), seed)


@over_all_seeds
def test_random_faults_over_all_seeds(seeds):
    for seed in seeds:
        play(random_load(seed), seed)


def test_simulation_is_reproducible():
    async def course(seed: int) -> list[tuple[float, str]]:
        sim = await random_load(seed)
        return [(call.time, call.op) for call in sim.backend.calls]

    assert play(course(3), 3) == play(course(3), 3)


def test_first_come_first_served():
    async def scenario() -> None:
        async with SimulatedPool(0, min_idle=0, max_size=1) as sim:
            served = []

            async def caller(number: int) -> None:
                lease = await sim.acquire()
                served.append(number)
                await asyncio.sleep(1)
                sim.release(lease)

            await asyncio.gather(*map(caller, range(20)))
            assert served == list(range(20))

    virtual_time.run(scenario())


def test_warm_sandbox_is_acquired_at_once():
    async def scenario(warm: str) -> None:
        async with SimulatedPool(0, min_idle=2, max_size=4, warm=warm) as sim:
            await sim.pool.wait_filled()
            start = sim.now()
            sim.release(await sim.acquire())
            assert sim.now() - start < 0.01
            assert sim.pool.stats().counters.hits == 1

    virtual_time.run(scenario("running"))
    virtual_time.run(scenario("paused"))


def test_paused_sandbox_is_kept_for_hours():
    async def scenario() -> None:
        async with SimulatedPool(0, min_idle=2, max_size=2, warm="paused", max_age=1e6) as sim:
            await sim.pool.wait_filled()
            made = set(sim.backend.boxes)
            await asyncio.sleep(4 * 3600)
            assert set(sim.backend.boxes) == made  # checked and extended, not replaced
            assert all(box.paused for box in sim.backend.boxes.values())
            lease = await sim.acquire()
            expires = lease.box.info.expires
            assert expires is not None
            assert (await lease.box.exec("true")).ok
            sim.release(lease)

    virtual_time.run(scenario())


def test_reused_sandbox_is_reset_and_replaced_after_max_uses():
    async def scenario(reset) -> None:
        async with SimulatedPool(0, min_idle=1, max_size=1, max_uses=3, reset=reset) as sim:
            ids = []
            for _ in range(6):
                lease = await sim.acquire()
                assert not await lease.box.files.exists("left")
                await lease.box.files.write("left", b"behind")
                ids.append(lease.box.id)
                sim.release(lease)
            assert len(set(ids)) == 2
            assert ids[0] == ids[1] == ids[2]

    async def clean(box) -> None:
        await box.files.remove("left")

    virtual_time.run(scenario("snapshot"))
    virtual_time.run(scenario(clean))


def test_on_exhausted():
    async def scenario(on_exhausted: str) -> None:
        async with SimulatedPool(0, min_idle=0, max_size=1, on_exhausted=on_exhausted) as sim:
            lease = await sim.acquire()
            start = sim.now()
            if on_exhausted == "create":
                extra = await sim.acquire()
                assert sim.pool.stats().extra == 1
                sim.release(extra)
            else:
                with pytest.raises(PoolExhausted, match="1 in use"):
                    await sim.acquire(timeout=3)
                assert sim.now() - start == pytest.approx(3 if on_exhausted == "wait" else 0)
            sim.release(lease)

    for choice in ("wait", "fail", "create"):
        virtual_time.run(scenario(choice))


def test_second_release_does_nothing():
    async def scenario() -> None:
        async with SimulatedPool(0, min_idle=0, max_size=1, max_uses=9, reset="snapshot") as sim:
            first = await sim.acquire()
            first.release()
            sim.holders.clear()
            second = await sim.acquire()
            first.release()  # does nothing
            assert sim.pool.stats().busy == 1
            second.release()
            sim.holders.clear()

    virtual_time.run(scenario())


def test_nothing_is_created_beyond_the_watermark():
    async def scenario() -> None:
        usage = [HostUsage(0.95, 0.1)]
        async with SimulatedPool(0, min_idle=2, max_size=2, host=lambda: usage[0]) as sim:
            await asyncio.sleep(6)
            for id in list(sim.backend.boxes):
                sim.backend.die(id)
            await asyncio.sleep(60)
            assert not sim.backend.boxes
            with pytest.raises(PoolExhausted, match="95% of the host's memory"):
                await sim.acquire(timeout=1)
            usage[0] = HostUsage(0.5, 0.1)
            await asyncio.sleep(40)
            assert len(sim.backend.boxes) == 2

    virtual_time.run(scenario())


def test_old_and_surplus_sandboxes_are_removed():
    async def scenario() -> None:
        async with SimulatedPool(0, min_idle=1, max_size=6, max_age=600) as sim:
            takers = [asyncio.ensure_future(sim.acquire()) for _ in range(6)]
            await asyncio.sleep(0.1)
            for taker in takers:
                taker.cancel()
            await asyncio.sleep(120)
            assert len(sim.backend.boxes) == 1
            (first,) = sim.backend.boxes
            await asyncio.sleep(620)
            assert len(sim.backend.boxes) == 1
            assert first not in sim.backend.boxes

    virtual_time.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_idle": 3, "max_size": 2},
        {"max_size": 0},
        {"max_uses": 5},
        {"max_uses": 0, "reset": "snapshot"},
        {"reset": "snapshot"},
        {"reset": "erase", "max_uses": 5},
        {"warm": "cold"},
        {"on_exhausted": "retry"},
        {"refill_concurrency": 0},
        {"max_age": -1},
        {"max_age": "1h"},
        {"min_idle": "2"},
        {"max_size": 2.5},
        {"acquire_timeout": None},
        {"backend": 3},
        {"health": {"ping_interval": 1.0}},
        {"hedge": "p95"},
        {"breaker": "docker"},
        {"host": "docker"},
    ],
)
def test_wrong_settings_are_errors(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SandboxPool(**{"backend": FakeBackend(), "min_idle": 0, **wrong})


def test_an_image_is_a_specification():
    assert SandboxPool("python:3.12", FakeBackend()).spec.image == "python:3.12"


def test_acquire_before_start_is_an_error():
    async def scenario() -> None:
        pool = SandboxPool(backend=FakeBackend())
        with pytest.raises(PoolClosed, match="async with"):
            await pool.acquire()
        await pool.close()

    virtual_time.run(scenario())


def test_close_ends_wait_filled():
    async def scenario() -> None:
        async with SimulatedPool(0, min_idle=1, max_size=1) as sim:
            sim.backend.inject(Fault("create", "fail", phase="pull", times=None))
            await asyncio.sleep(60)
            waiting = asyncio.ensure_future(sim.pool.wait_filled())
            await asyncio.sleep(0.1)
            await until(lambda: not sim.pool.stats().size, 60)  # no slot is left whose end could wake the caller
            await sim.pool.close()
            with pytest.raises(PoolClosed):
                await asyncio.wait_for(waiting, 1)

    virtual_time.run(scenario())


def test_hung_sandbox_is_detected_within_five_seconds():
    assert HealthPolicy().detection <= 5
    assert simulation.CPUS >= 2
