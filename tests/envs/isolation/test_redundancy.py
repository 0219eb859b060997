"""Environments in simulated sandboxes that fail: the episodes stay the same, and nothing is left behind.

The server of environments is the real one; sandboxes and time are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import faulty_envs
import pytest
from seeds import over_all_seeds

import agentkit
from agentkit.envs.framing import FrameReader
from agentkit.envs.isolation import protocol
from agentkit.envs.isolation.allocator import SandboxAllocator
from agentkit.envs.isolation.env import SandboxedEnv
from agentkit.envs.isolation.placement import place
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.isolation.server import Server
from agentkit.errors import ConfigError, EnvCrashed
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import Command, FakeBackend

ACTIONS = ["a", "b", "c", "d", "e", "f"]


class World:
    """A simulated engine whose sandboxes serve environments. Making an environment takes a second."""

    def __init__(self, seed: int, entry: str, redundancy: Redundancy) -> None:
        self.rng = random.Random(seed)
        self.backend = FakeBackend(seed=seed, commands={"python3": self._serve})
        agentkit.register(f"{entry}-v0", f"faulty_envs:{entry}")
        self.allocator = SandboxAllocator(place(f"{entry}-v0", {}, self.backend), redundancy)
        self.slow: dict[str, float] = {}
        """Seconds that each answer takes longer, by sandbox."""
        self.envs: list[SandboxedEnv] = []

    def env(self) -> SandboxedEnv:
        self.envs.append(SandboxedEnv("Faulty-v0", allocator=self.allocator))
        return self.envs[-1]

    def box(self, env: SandboxedEnv) -> str:
        assert env._env.target is not None
        return env._env.target.sandbox_id

    def standbys(self, env: SandboxedEnv) -> list[str]:
        return [] if env._env._standbys is None else [one.sandbox_id for one in env._env._standbys.caught_up()]

    async def ready(self) -> None:
        """Let spares and standbys become complete."""
        await asyncio.sleep(10)
        assert self.allocator.spares == self.allocator.redundancy.spares
        assert all(len(self.standbys(env)) == self.allocator.redundancy.standbys for env in self.envs)

    async def _serve(self, command: Command, *arguments: str) -> None:
        server, reader, started = Server(), FrameReader(protocol.LIMITS), False
        while True:
            for _, content in reader.feed(await command.read()):
                await command.sleep(0.001 + self.slow.get(command.box.id, 0.0) + (0.0 if started else 1.0))
                started = True  # modules are imported only once
                await command.write(server.answer(protocol.decode(content)))


@contextlib.asynccontextmanager
async def world(seed: int = 0, entry: str = "Faulty", **redundancy: Any) -> AsyncIterator[World]:
    made = World(seed, entry, Redundancy(**redundancy))
    try:
        yield made
        await asyncio.gather(*(env.close() for env in made.envs))
    finally:
        await made.allocator.close()
    assert made.backend.boxes == {}
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, left


def expected(seed: int, actions: list[str] = ACTIONS) -> list[Any]:
    here = faulty_envs.Faulty()
    return [here.reset(seed=seed), *(here.step(action) for action in actions)]


async def play(env: SandboxedEnv, seed: int, rng: random.Random) -> None:
    seen: list[Any] = [await env.reset(seed=seed)]
    for action in ACTIONS:
        await asyncio.sleep(rng.choice([0.0, 0.01, 1.0, 5.0]))
        seen.append(await env.step(action))
    assert seen == expected(seed)


async def episodes_stay_the_same(seed: int) -> None:
    """Any sandbox may die, freeze, hang or be removed at any moment, also during a recovery."""
    async with world(seed, share=3, spread=2, spares=seed % 3, standbys=seed % 2) as sim:

        async def disturb() -> None:
            while True:
                await asyncio.sleep(sim.rng.expovariate(1 / 6))
                boxes = [id for id, box in sim.backend.boxes.items() if box.exit_code is None and not box.paused]
                if boxes:
                    fault = sim.rng.choice([sim.backend.die, sim.backend.freeze, sim.backend.mute, sim.backend.forget])
                    fault(sim.rng.choice(boxes))

        async def player(number: int) -> None:
            env = sim.env()
            for episode in range(3):
                await play(env, 10 * number + episode, sim.rng)

        disturbing = asyncio.ensure_future(disturb())
        try:
            await asyncio.gather(*(player(number) for number in range(5)))
        finally:
            disturbing.cancel()
            await asyncio.wait({disturbing})


@pytest.mark.parametrize("seed", range(4))
def test_episodes_stay_the_same(seed: int) -> None:
    virtual_time.run(episodes_stay_the_same(seed))


@over_all_seeds
def test_episodes_stay_the_same_over_all_seeds(seeds: range) -> None:
    for seed in seeds:
        virtual_time.run(episodes_stay_the_same(seed))


@pytest.mark.parametrize(("standbys", "by", "seconds"), [(0, "spare", 0.1), (1, "standby", 0.05)])
def test_a_replacement_is_ready_before_the_next_step(standbys: int, by: str, seconds: float) -> None:
    async def run() -> None:
        async with world(share=4, spares=1, standbys=standbys) as sim:
            envs = [sim.env() for _ in range(4)]
            for number, env in enumerate(envs):
                await env.reset(seed=number)
                await env.step("a")
            await sim.ready()
            boxes = {sim.box(env) for env in envs}
            assert all(not boxes & set(sim.standbys(env)) for env in envs)
            assert len(boxes) == 1
            sim.backend.die(boxes.pop())
            await asyncio.sleep(seconds)
            log = sim.allocator.log
            assert {recovery.by for recovery in log.recent} == {by}
            assert {recovery.cause for recovery in log.recent} == {"exited"}
            assert all(recovery.seconds < seconds for recovery in log.recent)
            assert log.total == 4
            for number, env in enumerate(envs):
                assert await env.step("b") == expected(number, ["a", "b"])[2]

    virtual_time.run(run())


def test_frozen_sandbox_is_left_within_five_seconds() -> None:
    async def run() -> None:
        async with world(spares=1) as sim:
            env = sim.env()
            await env.reset(seed=1)
            await sim.ready()
            sim.backend.mute(sim.box(env))  # its agent hangs; the engine sees nothing
            began = asyncio.get_running_loop().time()
            assert await env.step("a") == expected(1, ["a"])[1]
            assert asyncio.get_running_loop().time() - began < 5.0

    virtual_time.run(run())


def test_spare_that_dies_too_is_replaced() -> None:
    async def run() -> None:
        async with world(spares=1) as sim:
            env = sim.env()
            await env.reset(seed=1)
            for action in ACTIONS[:3]:
                await sim.ready()
                for id in list(sim.backend.boxes):
                    sim.backend.die(id)
                assert await env.step(action) == expected(1)[1 + ACTIONS.index(action)]
            assert sim.allocator.log.total == 3

    virtual_time.run(run())


def test_slow_resets_and_steps_are_hedged_and_neighbours_keep_their_sandbox() -> None:
    async def run() -> None:
        async with world(share=3, spares=1, hedge=0.5) as sim:
            env, neighbour = sim.env(), sim.env()
            assert sim.allocator.hedge is not None
            for one in (env, neighbour):
                await one.reset(seed=1)
            for hedged in ("reset", "step"):
                await sim.ready()
                for _ in range(20):  # a hedged call needs 20 others
                    await neighbour.reset(seed=1)
                slow = sim.box(env)
                sim.slow[slow] = 5.0
                began = asyncio.get_running_loop().time()
                result = await (env.reset(seed=3) if hedged == "reset" else env.step("a"))
                assert result == expected(3)[0 if hedged == "reset" else 1]
                assert asyncio.get_running_loop().time() - began < 0.6
                assert sim.allocator.log.won[hedged] == 1
                del sim.slow[slow]
                assert sim.box(neighbour) in sim.backend.boxes
                if hedged == "reset":
                    assert sim.box(neighbour) == slow
            await neighbour.step("a")

    virtual_time.run(run())


def test_code_of_the_policy_gets_no_second_attempt_by_being_slow() -> None:
    async def run() -> None:
        async with world(entry="Programs", spares=1, standbys=1, hedge=0.5) as sim:
            env = sim.env()
            for seed in range(21):  # so that a call would be hedged
                await env.reset(seed=seed)
            await sim.ready()
            sim.slow[sim.box(env)] = 5.0
            assert await env.step("a") == expected(20)[1]
            assert sim.allocator.log.hedged["step"] == 0

    virtual_time.run(run())


def test_environment_that_fails_by_itself_is_given_up() -> None:
    async def run() -> None:
        async with world(spares=1) as sim:
            env = sim.env()
            await env.reset(seed=1)
            with pytest.raises(EnvCrashed, match="no such room"):
                await env.step("raise")
            with pytest.raises(EnvCrashed, match="call reset first"):
                await env.step("a")
            await play(env, 2, sim.rng)

    virtual_time.run(run())


def test_cancellation_at_any_moment_leaves_nothing() -> None:
    async def run(seed: int) -> None:
        async with world(seed, share=2, spares=1, standbys=1, hedge=0.3) as sim:
            tasks = [asyncio.ensure_future(play(sim.env(), number, sim.rng)) for number in range(3)]
            for task in tasks:
                asyncio.get_running_loop().call_later(sim.rng.uniform(0, 10), task.cancel)
            asyncio.get_running_loop().call_later(sim.rng.uniform(0, 5), _kill_one, sim)
            await asyncio.wait(tasks)

    for seed in range(10):
        virtual_time.run(run(seed))


def _kill_one(sim: World) -> None:
    if sim.backend.boxes:
        sim.backend.die(sim.rng.choice(sorted(sim.backend.boxes)))


def test_a_lost_spare_is_not_reported_as_in_use() -> None:
    async def run() -> None:
        retired: list[object] = []
        async with world(spares=1) as sim:
            env = sim.env()
            await env.reset(seed=0)
            await sim.ready()
            with telemetry.listening(retired.append):
                (spare,) = sim.backend.boxes.keys() - {sim.box(env)}
                sim.backend.die(spare)
                await sim.ready()
                used = sim.box(env)
                sim.backend.die(used)
                await env.step("a")
                taken = sim.box(env)
                sim.backend.die(taken)
                await env.step("b")
        seen = {one.sandbox: one.in_use for one in retired if isinstance(one, telemetry.Retired)}
        assert (seen[spare], seen[used], seen[taken]) == (False, True, True)

    virtual_time.run(run())


def test_contradicting_settings_are_errors() -> None:
    contradictions: list[dict[str, Any]] = [
        {"standbys": 1, "recovery": "void"}, {"spares": -1}, {"spares": 1.5}, {"hedge": "p42"}, {"share": 0},
        {"standbys": True}, {"spares": True}, {"hedge": True}, {"hedge": [1]}, {"health": {"eject": 0.1}},
    ]  # fmt: skip
    for wrong in contradictions:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Redundancy(**wrong)
    with pytest.raises(ConfigError, match="not deterministic"):
        Redundancy(standbys=1).mode(deterministic=False)
    assert Redundancy().mode(deterministic=False) == "retry"
