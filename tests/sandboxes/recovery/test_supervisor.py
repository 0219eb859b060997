"""Recovery of supervised sandboxes: their state, its limits, and promotion of standbys."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from seeds import over_all_seeds
from simulation import SimulatedPool, play

from agentkit.errors import ConfigError, DiskFull, SandboxLost
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.recovery.supervisor import SandboxRecovery, SupervisedSandbox, Supervisor
from agentkit.sandboxes.testing import virtual_time
from benchmarks.scale.cluster import Cluster

SCENARIOS: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {}


def scenario(function: Callable[[int], Coroutine[Any, Any, None]]) -> Callable[[int], Coroutine[Any, Any, None]]:
    SCENARIOS[function.__name__] = function
    return function


async def survive(box: SupervisedSandbox, command: str) -> str | None:
    """Return the output of the command, or None if the sandbox was lost meanwhile."""
    try:
        return (await box.exec(command)).stdout
    except SandboxLost:
        return None


@scenario
async def restart_starts_with_empty_files(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3) as sim, Supervisor(sim.pool).run() as box:
        await box.write("kept", b"?")
        id = box.status.id
        sim.rng.choice([sim.backend.die, sim.backend.cut, sim.backend.oom])(id)
        await asyncio.sleep(0.001)  # the loss is detected
        assert (await box.exec("ls")).stdout == ""
        assert box.status.observed == "running"
        assert box.recoveries == 1
        if id in sim.backend.boxes:
            assert box.status.id == id


@scenario
async def fail_stays_lost(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=1, max_size=3) as sim,
        Supervisor(sim.pool, recovery="fail").run() as box,
    ):
        sim.backend.die(box.status.id)
        for _ in range(2):
            with pytest.raises(SandboxLost, match="exited"):
                await box.exec("true")
        assert box.status.observed == "failed"


@scenario
async def replay_repeats_exactly_the_successful_calls(seed: int) -> None:
    """After any kills, the file has the output of the successful commands in order."""
    async with (
        SimulatedPool(seed, min_idle=2, max_size=5) as sim,
        Supervisor(sim.pool, recovery="replay", replicas=seed % 3, max_recoveries=100).run() as box,
    ):
        done = []
        for number in range(15):
            if sim.rng.random() < 0.3 and sim.backend.boxes:
                victim = sim.rng.choice(sorted(sim.backend.boxes))
                sim.rng.choice([sim.backend.die, sim.backend.cut])(victim)
            if sim.rng.random() < 0.3:
                asyncio.get_running_loop().call_later(sim.rng.uniform(0, 0.01), _die, sim, box)
            if await survive(box, f"append log {number}") is not None:
                done.append(number)
            await asyncio.sleep(sim.rng.choice([0, 0.001, 1]))
        expected = "".join(f"{number}\n" for number in done)
        for _ in range(20):
            with contextlib.suppress(SandboxLost):
                assert (await box.read("log")).decode() == expected
                break
            await asyncio.sleep(1)
        else:
            pytest.fail("the sandbox was not recovered")


def _die(sim: SimulatedPool, box: SupervisedSandbox) -> None:
    with contextlib.suppress(KeyError):
        sim.backend.die(box.status.id)


@scenario
async def standby_is_promoted_within_a_second(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=2, max_size=4) as sim,
        Supervisor(sim.pool, recovery="replay", replicas=1).run() as box,
    ):
        for number in range(10):
            await box.exec(f"append log {number} 0.1")
        # The standby may still carry out the last action.
        await asyncio.sleep(sim.rng.choice([0.0, 0.05, 2.0]))
        first, start = box.status.id, sim.now()
        sim.backend.die(first)
        await asyncio.sleep(0.001)
        assert (await box.exec("cat log")).stdout == "".join(f"{number}\n" for number in range(10))
        assert sim.now() - start < 1.0
        assert box.status.id != first


@scenario
async def hung_standby_is_replaced(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=2, max_size=4) as sim,
        Supervisor(sim.pool, recovery="replay", replicas=1).run() as box,
    ):
        await asyncio.sleep(2)
        assert box._standbys is not None
        standby = box._standbys.caught_up()[0].box.id
        sim.rng.choice([sim.backend.freeze, sim.backend.mute])(standby)
        await box.exec("append log kept")
        await asyncio.sleep(sim.rng.uniform(0, 30))
        start = sim.now()
        _die(sim, box)
        await asyncio.sleep(0.001)
        assert await box.read("log") == b"kept\n"
        assert sim.now() - start < 25
        await asyncio.sleep(25)
        assert standby not in sim.backend.boxes
        assert [one.box.id for one in box._standbys.caught_up()] != [standby]
        assert len(box._standbys.caught_up()) == 1


@scenario
async def snapshot_recovers_from_the_checkpoint(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=1, max_size=3) as sim,
        Supervisor(sim.pool, recovery="snapshot").run() as box,
    ):
        await box.exec("identify before")
        await box.checkpoint()
        before = await box.read("before")
        await box.exec("append after after")
        sim.backend.die(box.status.id)
        await asyncio.sleep(0.001)
        assert await box.read("before") == before
        assert await box.read("after") == b"after\n"


@scenario
async def hung_sandbox_is_replaced_and_its_call_fails(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=1, max_size=3) as sim,
        Supervisor(sim.pool, recovery=sim.rng.choice(["restart", "replay"])).run() as box,
    ):
        await box.write("kept", b"?")
        start = sim.now()
        sim.rng.choice([sim.backend.freeze, sim.backend.mute])(box.status.id)
        with pytest.raises(SandboxLost):
            await box.exec("echo hi", timeout=300)
        assert sim.now() - start < 30
        assert (await box.exec("echo hi")).stdout == "hi\n"


@scenario
async def a_crash_loop_fails_and_does_not_affect_others(seed: int) -> None:
    async with SimulatedPool(seed, min_idle=1, max_size=3) as sim, Supervisor(sim.pool).run() as box:
        crashes = 0
        while box.status.observed != "failed":
            if box.status.observed == "running":
                crashes += 1
                _die(sim, box)
            await asyncio.sleep(0.05)
        assert crashes == 4  # the sandbox, and three restarts
        assert "crash loop" in box.status.cause
        with pytest.raises(SandboxLost, match="crash loop"):
            await box.exec("true")
        assert sim.breaker.opened == 0  # the engine has no fault
        for _ in range(3):
            sim.release(await sim.acquire(timeout=10))


@scenario
async def diverging_or_unknown_actions_are_not_rebuilt(seed: int) -> None:
    async with (
        SimulatedPool(seed, min_idle=1, max_size=3) as sim,
        Supervisor(sim.pool, recovery="replay").run() as box,
    ):
        if seed % 3 == 0:
            await box.exec("sleep 100", timeout=1)
            match = "timeout"
        elif seed % 3 == 1:
            size = sim.pool.spec.resources.workspace + 1
            with pytest.raises(DiskFull):
                await box.write("file", bytes(size))
            match = "effect is not known"
        else:
            await box.exec("identify file")  # a different text in each sandbox
            await box.exec("cat file")
            match = "another result"
        sim.backend.die(box.status.id)
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


def test_cancellation_at_any_moment_releases_everything():
    async def run(seed: int) -> None:
        rng = random.Random(seed)
        async with SimulatedPool(seed, min_idle=1, max_size=4) as sim:

            async def user() -> None:
                recovery: SandboxRecovery = rng.choice(["restart", "replay"])
                supervisor = Supervisor(sim.pool, recovery=recovery, replicas=int(recovery == "replay"))
                async with supervisor.run() as box:
                    for number in range(5):
                        with contextlib.suppress(SandboxLost):
                            await box.exec(f"append log {number} 0.2")
                        if rng.random() < 0.3:
                            _die(sim, box)

            task = asyncio.ensure_future(user())
            asyncio.get_running_loop().call_later(rng.uniform(0, 3), task.cancel)
            await asyncio.wait({task})
            await asyncio.sleep(0.01)
            assert sim.pool.stats().busy == 0

    for seed in range(40):
        play(run(seed), seed)


def test_contradicting_settings_are_errors():
    async def run() -> None:
        async with SimulatedPool(0, min_idle=0, max_size=1) as sim:
            with pytest.raises(ConfigError, match="replay"):
                Supervisor(sim.pool, recovery="restart", replicas=1)
            with pytest.raises(ConfigError, match="recovery='repeat' must be one of 'fail', 'restart'"):
                Supervisor(sim.pool, recovery="repeat")  # pyright: ignore[reportArgumentType]
            with pytest.raises(ConfigError, match="replicas=-1"):
                Supervisor(sim.pool, recovery="replay", replicas=-1)
            async with Supervisor(sim.pool).run() as box:
                with pytest.raises(ConfigError, match="checkpoint"):
                    await box.checkpoint()

    virtual_time.run(run())


def test_standby_is_on_another_host():
    async def run() -> None:
        cluster = Cluster(hosts=3, limit=20, seed=0)
        await cluster.start()
        backend = cluster.backend()
        await backend.start()
        async with SandboxPool(backend=backend, min_idle=3, max_size=12) as pool:
            await pool.wait_filled()
            assert len(pool.hosts()) > 1
            for _ in range(6):
                async with Supervisor(pool, recovery="replay", replicas=2).run() as box:
                    await asyncio.sleep(5)
                    assert box._standbys is not None
                    hosts = {box.target.host, *(one.host for one in box._standbys.caught_up())}
                    assert len(hosts) == 3
        await backend.close()
        await cluster.stop()

    virtual_time.run(run())
