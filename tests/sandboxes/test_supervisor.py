"""Sandboxes that come back: in which state, how often, and when they are given up; standbys that take over at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from seeds import over_all_seeds
from simulation import World, play

from agentkit.errors import ConfigError, SandboxLost
from agentkit.sandboxes.backends import virtual_time
from agentkit.sandboxes.supervisor import Recovery, Supervised, Supervisor

SCENARIOS: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {}


def scenario(function: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[int], Coroutine[Any, Any, None]]:
    SCENARIOS[function.__name__] = function
    return function


async def survive(box: Supervised, command: str) -> str | None:
    """What the command said, or None if the sandbox was lost while it ran."""
    try:
        return (await box.exec(command)).stdout
    except SandboxLost:
        return None


@scenario
async def restart_begins_with_an_empty_one(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world, Supervisor(world.pool).run() as box:
        await box.write("kept", b"?")
        id = box.status.id
        world.rng.choice([world.backend.die, world.backend.cut, world.backend.oom])(id)
        await asyncio.sleep(0.001)  # the news travels
        assert (await box.exec("ls")).stdout == ""
        assert box.status.observed == "running"
        assert box.recoveries == 1
        if id in world.backend.boxes:
            assert box.status.id == id


@scenario
async def fail_stays_lost(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world, Supervisor(world.pool, recovery="fail").run() as box:
        world.backend.die(box.status.id)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="exited"):
                await box.exec("true")
        assert box.status.observed == "failed"


@scenario
async def replay_rebuilds_what_was_done_and_nothing_else(seed: int) -> None:
    """Whatever is killed when: the files are those of the commands that succeeded, in their order."""
    async with (
        World(seed, min_idle=2, max_size=5) as world,
        Supervisor(world.pool, recovery="replay", replicas=seed % 3, intensity=100).run() as box,
    ):
        done = []
        for number in range(15):
            if world.rng.random() < 0.3 and world.backend.boxes:
                victim = world.rng.choice(sorted(world.backend.boxes))
                world.rng.choice([world.backend.die, world.backend.cut])(victim)
            if world.rng.random() < 0.3:
                asyncio.get_running_loop().call_later(world.rng.uniform(0, 0.01), _die, world, box)
            if await survive(box, f"echo {number} >> log") is not None:
                done.append(number)
            await asyncio.sleep(world.rng.choice([0, 0.001, 1]))
        expected = "".join(f"{number}\n" for number in done)
        for _ in range(20):
            with contextlib.suppress(SandboxLost):
                assert (await box.read("log")).decode() == expected
                break
            await asyncio.sleep(1)
        else:
            pytest.fail("it never came back")


def _die(world: World, box: Supervised) -> None:
    with contextlib.suppress(KeyError):
        world.backend.die(box.status.id)


@scenario
async def a_standby_takes_over_within_a_second(seed: int) -> None:
    async with (
        World(seed, min_idle=2, max_size=4) as world,
        Supervisor(world.pool, recovery="replay", replicas=1).run() as box,
    ):
        for number in range(10):
            await box.exec(f"echo {number} >> log; sleep 0.1")
        # The last action may still be under way in the standby.
        await asyncio.sleep(world.rng.choice([0.0, 0.05, 2.0]))
        first, start = box.status.id, world.now()
        world.backend.die(first)
        await asyncio.sleep(0.001)
        assert (await box.exec("cat log")).stdout == "".join(f"{number}\n" for number in range(10))
        assert world.now() - start < 1.0
        assert box.status.id != first


@scenario
async def a_standby_that_hangs_is_replaced(seed: int) -> None:
    async with (
        World(seed, min_idle=2, max_size=4) as world,
        Supervisor(world.pool, recovery="replay", replicas=1).run() as box,
    ):
        await asyncio.sleep(2)
        assert box._standbys is not None
        standby = box._standbys.caught_up()[0].id
        world.rng.choice([world.backend.freeze, world.backend.mute])(standby)
        await box.exec("echo kept > log")
        await asyncio.sleep(world.rng.uniform(0, 30))
        start = world.now()
        _die(world, box)
        await asyncio.sleep(0.001)
        assert await box.read("log") == b"kept\n"
        assert world.now() - start < 25
        await asyncio.sleep(25)
        assert standby not in world.backend.boxes
        assert [one.id for one in box._standbys.caught_up()] != [standby]
        assert len(box._standbys.caught_up()) == 1


@scenario
async def a_checkpoint_is_where_snapshots_recover_from(seed: int) -> None:
    async with (
        World(seed, min_idle=1, max_size=3) as world,
        Supervisor(world.pool, recovery="snapshot").run() as box,
    ):
        await box.exec("echo $RANDOM > before; date > then")
        await box.checkpoint()
        before = await box.read("before")
        await box.exec("echo after > after")
        world.backend.die(box.status.id)
        await asyncio.sleep(0.001)
        assert await box.read("before") == before
        assert await box.read("after") == b"after\n"


@scenario
async def a_hung_one_is_replaced_and_its_caller_told(seed: int) -> None:
    async with (
        World(seed, min_idle=1, max_size=3) as world,
        Supervisor(world.pool, recovery=world.rng.choice(["restart", "replay"])).run() as box,
    ):
        await box.write("kept", b"?")
        start = world.now()
        world.rng.choice([world.backend.freeze, world.backend.mute])(box.status.id)
        with pytest.raises(SandboxLost):
            await box.exec("echo hi", timeout=300)
        assert world.now() - start < 30
        assert (await box.exec("echo hi")).stdout == "hi\n"


@scenario
async def a_crash_loop_is_given_up_and_harms_nobody_else(seed: int) -> None:
    async with World(seed, min_idle=1, max_size=3) as world, Supervisor(world.pool).run() as box:
        crashes = 0
        while box.status.observed != "failed":
            if box.status.observed == "running":
                crashes += 1
                _die(world, box)
            await asyncio.sleep(0.05)
        assert crashes == 4  # the sandbox, and three restarts
        assert "crash loop" in box.status.cause
        with pytest.raises(SandboxLost, match="crash loop"):
            await box.exec("true")
        assert world.stock.breaker.opened == 0  # the engine has done nothing wrong
        for _ in range(3):
            world.give(await world.take(timeout=10))


@scenario
async def what_depends_on_chance_is_not_rebuilt(seed: int) -> None:
    async with (
        World(seed, min_idle=1, max_size=3) as world,
        Supervisor(world.pool, recovery="replay").run() as box,
    ):
        if seed % 2:
            await box.exec("sleep 100", timeout=1)
            match = "timeout"
        else:
            # Another sandbox gives another answer.
            await box.exec("echo one")
            log = box._log._actions
            log[0] = type(log[0])(log[0].name, log[0].run, "something else", 0)
            match = "came out differently"
        world.backend.die(box.status.id)
        await asyncio.sleep(0.001)
        with pytest.raises(SandboxLost, match=match):
            await box.exec("true")
        assert box.status.observed == "failed"


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    for seed in range(6):
        play(SCENARIOS[name](seed), seed)


@over_all_seeds
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_over_all_seeds(name, seeds):
    for seed in seeds:
        play(SCENARIOS[name](seed), seed)


def test_leaving_at_any_moment_gives_everything_back():
    async def run(seed: int) -> None:
        rng = random.Random(seed)
        async with World(seed, min_idle=1, max_size=4) as world:

            async def user() -> None:
                recovery: Recovery = rng.choice(["restart", "replay"])
                supervisor = Supervisor(world.pool, recovery=recovery, replicas=int(recovery == "replay"))
                async with supervisor.run() as box:
                    for number in range(5):
                        with contextlib.suppress(SandboxLost):
                            await box.exec(f"echo {number} >> log; sleep 0.2")
                        if rng.random() < 0.3:
                            _die(world, box)

            task = asyncio.ensure_future(user())
            asyncio.get_running_loop().call_later(rng.uniform(0, 3), task.cancel)
            await asyncio.wait({task})
            await asyncio.sleep(0.01)
            assert world.pool.stats().busy == 0

    for seed in range(40):
        play(run(seed), seed)


def test_settings_that_contradict_each_other_are_refused():
    async def run() -> None:
        async with World(0, min_idle=0, max_size=1) as world:
            with pytest.raises(ConfigError, match="replay"):
                Supervisor(world.pool, recovery="restart", replicas=1)
            async with Supervisor(world.pool).run() as box:
                with pytest.raises(ConfigError, match="checkpoint"):
                    await box.checkpoint()

    virtual_time.run(run())
