"""The pool under all faults that concern it, over many seeds, in virtual time. A failure names its seed."""

from __future__ import annotations

import asyncio

import pytest
import simulation
from pool_cases import CASES
from seeds import over_all_seeds
from simulation import World, play, storm

from agentkit.errors import ConfigError, PoolClosed, PoolExhausted
from agentkit.sandboxes.backends import virtual_time
from agentkit.sandboxes.backends.fake import FakeBackend
from agentkit.sandboxes.health import HealthPolicy, HostUsage
from agentkit.sandboxes.pool import SandboxPool

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


def test_anything_at_any_time():
    for seed in range(30):
        play(storm(seed), seed)


@over_all_seeds
def test_anything_at_any_time_over_all_seeds(seeds):
    for seed in seeds:
        play(storm(seed), seed)


def test_a_seed_can_be_played_again():
    async def course(seed: int) -> list[tuple[float, str]]:
        world = await storm(seed)
        return [(call.time, call.op) for call in world.backend.calls]

    assert play(course(3), 3) == play(course(3), 3)


def test_first_come_first_served():
    async def scenario() -> None:
        async with World(0, min_idle=0, max_size=1) as world:
            served = []

            async def customer(number: int) -> None:
                lease = await world.take()
                served.append(number)
                await asyncio.sleep(1)
                world.give(lease)

            await asyncio.gather(*map(customer, range(20)))
            assert served == list(range(20))

    virtual_time.run(scenario())


def test_a_warm_one_is_handed_out_at_once():
    async def scenario(warm: str) -> None:
        async with World(0, min_idle=2, max_size=4, warm=warm) as world:
            await world.pool.filled()
            start = world.now()
            world.give(await world.take())
            assert world.now() - start < 0.01
            assert world.pool.stats().counters.hits == 1

    virtual_time.run(scenario("running"))
    virtual_time.run(scenario("paused"))


def test_a_paused_one_lives_on_for_hours():
    async def scenario() -> None:
        async with World(0, min_idle=2, max_size=2, warm="paused", max_age=1e6) as world:
            await world.pool.filled()
            made = set(world.backend.boxes)
            await asyncio.sleep(4 * 3600)
            assert set(world.backend.boxes) == made  # looked after, prolonged, and not replaced
            assert all(box.paused for box in world.backend.boxes.values())
            lease = await world.take()
            expires = lease.box.info.expires
            assert expires is not None
            assert (await lease.box.exec("true")).ok
            world.give(lease)

    virtual_time.run(scenario())


def test_reuse_resets_and_wears_out():
    async def scenario(reset) -> None:
        async with World(0, min_idle=1, max_size=1, max_uses=3, reset=reset) as world:
            ids = []
            for _ in range(6):
                lease = await world.take()
                assert not await lease.box.files.exists("left")
                await lease.box.files.write("left", b"behind")
                ids.append(lease.box.id)
                world.give(lease)
            assert len(set(ids)) == 2
            assert ids[0] == ids[1] == ids[2]

    async def clean(box) -> None:
        await box.files.remove("left")

    virtual_time.run(scenario("snapshot"))
    virtual_time.run(scenario(clean))


def test_exhausted_pools_do_what_they_were_told():
    async def scenario(on_exhausted: str) -> None:
        async with World(0, min_idle=0, max_size=1, on_exhausted=on_exhausted) as world:
            lease = await world.take()
            start = world.now()
            if on_exhausted == "create":
                extra = await world.take()
                assert world.pool.stats().extra == 1
                world.give(extra)
            else:
                with pytest.raises(PoolExhausted, match="1 in use"):
                    await world.take(timeout=3)
                assert world.now() - start == pytest.approx(3 if on_exhausted == "wait" else 0)
            world.give(lease)

    for choice in ("wait", "fail", "create"):
        virtual_time.run(scenario(choice))


def test_a_lease_counts_once():
    async def scenario() -> None:
        async with World(0, min_idle=0, max_size=1, max_uses=9, reset="snapshot") as world:
            first = await world.take()
            first.release()
            world.holders.clear()
            second = await world.take()
            first.release()  # no more its own
            assert world.pool.stats().busy == 1
            second.release()
            world.holders.clear()

    virtual_time.run(scenario())


def test_nothing_is_created_beyond_the_watermark():
    async def scenario() -> None:
        usage = [HostUsage(0.95, 0.1)]
        async with World(0, min_idle=2, max_size=2, host=lambda: usage[0]) as world:
            await asyncio.sleep(6)
            for id in list(world.backend.boxes):
                world.backend.die(id)
            await asyncio.sleep(60)
            assert not world.backend.boxes
            with pytest.raises(PoolExhausted, match="95% of the host's memory"):
                await world.take(timeout=1)
            usage[0] = HostUsage(0.5, 0.1)
            await asyncio.sleep(40)
            assert len(world.backend.boxes) == 2

    virtual_time.run(scenario())


def test_old_and_surplus_ones_go():
    async def scenario() -> None:
        async with World(0, min_idle=1, max_size=6, max_age=600) as world:
            takers = [asyncio.ensure_future(world.take()) for _ in range(6)]
            await asyncio.sleep(0.1)
            for taker in takers:
                taker.cancel()
            await asyncio.sleep(120)
            assert len(world.backend.boxes) == 1
            (first,) = world.backend.boxes
            await asyncio.sleep(620)
            assert len(world.backend.boxes) == 1
            assert first not in world.backend.boxes

    virtual_time.run(scenario())


def test_settings_that_contradict_each_other_are_refused():
    for wrong in ({"min_idle": 3, "max_size": 2}, {"max_size": 0}, {"max_uses": 5}, {"reset": "snapshot"}):
        with pytest.raises(ConfigError):
            SandboxPool(backend=FakeBackend(), **{"min_idle": 0, **wrong})  # type: ignore[arg-type]


def test_a_pool_that_was_not_started_says_so():
    async def scenario() -> None:
        pool = SandboxPool(backend=FakeBackend())
        with pytest.raises(PoolClosed, match="async with"):
            await pool.take()
        await pool.close()

    virtual_time.run(scenario())


def test_detection_is_within_its_bound():
    assert HealthPolicy().detection <= 5
    assert simulation.CPUS >= 2
