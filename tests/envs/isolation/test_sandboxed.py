"""Environments in local sandboxes: the same episodes as without, and a typed error for each failure."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import Any

import faulty_envs
import numpy as np
import psutil
import pytest
from gymnasium.utils.env_checker import check_env
from requiring import require

import agentkit
from agentkit.envs.base import expert_actions
from agentkit.envs.isolation.allocator import SandboxAllocator
from agentkit.envs.isolation.env import SandboxedEnv, SandboxedTextEnv
from agentkit.envs.isolation.placement import place
from agentkit.envs.isolation.process import EnvProcess
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.errors import (
    ConfigError,
    EngineUnavailable,
    EnvContractError,
    EnvCrashed,
    EnvTimeout,
    RegistryError,
)
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.backends.local.backend import LocalBackend

PATIENCE = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))
PATIENT: dict[str, Any] = {"step_timeout": 120.0, "reset_timeout": 300.0}
"""Seconds, for a machine that does many other things."""


@pytest.fixture
async def local():
    """A started local back end; fails the test if sandboxes are left at the end."""
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    made, create = [], backend.create

    async def noted(id, spec, labels):
        made.append(id)
        return await create(id, spec, labels)

    backend.create = noted
    yield backend
    left = [id for id in made if (await backend.inspect(id)).state != "absent"]
    await backend.close()
    assert left == []


@pytest.fixture(autouse=True)
def faulty():
    agentkit.register("Faulty-v0", "faulty_envs:Faulty")
    agentkit.register("Alone-v0", "faulty_envs:Alone")
    agentkit.register("Moody-v0", "faulty_envs:Moody")


@contextlib.asynccontextmanager
async def sandboxed(backend, id="Faulty-v0", kwargs=None, **options):
    env = SandboxedEnv(id, kwargs, sandbox=backend, **{**PATIENT, **options})
    try:
        yield env
    finally:
        await env.close()


def sandbox_of(env: SandboxedEnv) -> Any:
    """Return the sandbox and the process in which an environment runs."""
    assert env._env.target is not None
    return env._env.target.sandbox


def episode(env, seed, actions):
    """Return all results of an environment in one episode."""
    seen = [env.reset(seed=seed)]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


@pytest.mark.parametrize(
    ("id", "kwargs", "actions"),
    [
        ("Sokoban-v0", {}, ["Up", "Down", "Left", "nonsense", "Right", "Down", "Left"]),
        ("FrozenLake-v1", {"is_slippery": True}, ["Right", "Down", "Right", "Down", "Right", "Down", "Left"]),
        ("Countdown-v0", {}, ["1 + 1", "é ü 🙂", "2 * 3"]),
    ],
)
def test_the_same_seed_and_actions_give_the_same_episode_as_in_process(id, kwargs, actions):
    with contextlib.closing(agentkit.make(id, sandbox="local", **kwargs)) as there:
        here = agentkit.make(id, **kwargs)
        assert there.instructions == type(here).instructions_for(**kwargs)
        assert (there.max_turns, there.actions_per_turn) == (here.max_turns, here.actions_per_turn)
        assert there.action_space == here.action_space
        for seed in range(3):
            assert episode(there, seed, actions) == episode(here, seed, actions)
        assert there.reset() == here.reset()  # without a seed, chance goes on as it was
        try:
            assert list(there.expert()) == list(here.expert())
        except NotImplementedError:
            assert not there.description.has_expert


def test_gymnasium_accepts_it_and_pictures_are_the_same():
    with contextlib.closing(agentkit.make("Sokoban-v0", sandbox="local", render_mode="rgb_array")) as there:
        check_env(there, skip_render_check=True)
    with contextlib.closing(agentkit.make("Sokoban-v0", sandbox="local", render_mode="rgb_array")) as there:
        here = agentkit.make("Sokoban-v0", render_mode="rgb_array")
        observation, info = there.reset(seed=1)
        assert observation == here.reset(seed=1)[0]
        assert np.array_equal(there.render(), here.render())
        for action in expert_actions(there):
            *_, info = there.step(action)
        assert info["success"]
        there.close()
        there.close()


def test_the_host_imports_nothing_of_the_environment(tmp_path):
    (tmp_path / "foreign_env.py").write_text(
        "import sys\nfrom faulty_envs import Faulty as Foreign\nsys.stderr.write('imported')\n"
    )
    code = (
        "import sys, agentkit\n"
        "agentkit.register('Foreign-v0', 'foreign_env:Foreign', word='foreign')\n"
        "agentkit.list_envs()\n"
        f"shown = [{{'source': {faulty_envs.__file__!r}, 'target': '/opt/faulty_envs.py'}}]\n"
        "env = agentkit.make('Foreign-v0', sandbox='local', "
        "sandbox_spec={'mounts': shown, 'env': {'PYTHONPATH': '/opt'}})\n"
        "print(env.reset(seed=0)[0].split()[0])\n"
        "assert not {'foreign_env', 'faulty_envs', 'torch'} & set(sys.modules)\n"
    )  # the end of the interpreter removes the sandbox
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("foreign\n", "", 0)


def test_arguments_and_names_are_checked_before_or_inside():
    with pytest.raises(ConfigError, match="sandbox_spec"):
        agentkit.make("Sokoban-v0", sandbox_spec={"image": "x"})
    with pytest.raises(ConfigError, match="plain data"):
        agentkit.make("Sokoban-v0", sandbox="local", width=object())
    with pytest.raises(ConfigError, match="resources"):
        agentkit.make("Sokoban-v0", sandbox="local", sandbox_spec={"resources": {"memory": "much"}})
    with pytest.raises(ConfigError, match="did you mean 'local'"):
        agentkit.make("Sokoban-v0", sandbox="locl")
    with pytest.raises(RegistryError, match="Sokoban-v0"):
        agentkit.make("Sokobon-v0", sandbox="local")
    agentkit.register("Nested-v0", type("Nested", (faulty_envs.Faulty,), {"__qualname__": "f.<locals>.Nested"}))
    with pytest.raises(RegistryError, match="top level"):
        agentkit.make("Nested-v0", sandbox="local")


async def test_exceptions_and_invalid_results_do_not_end_the_process(local):
    async with sandboxed(local, redundancy=Redundancy(recovery="retry")) as env:
        first, info = await env.reset(seed=1, options={"level": 2})
        assert info["options"] == {"level": 2}
        process = sandbox_of(env).process
        for action, error, text in [
            ("raise", EnvCrashed, "no such room"),
            ("exit", EnvCrashed, "SystemExit: 3"),
            ("huge", EnvContractError, "characters"),
            ("nan", EnvContractError, "finite"),
            ("surrogate", EnvContractError, "surrogate"),
        ]:
            with pytest.raises(error, match=text) as caught:
                await env.step(action)
            if action == "raise":
                assert "faulty_envs.py" in str(caught.value.__cause__)
            assert await env.reset(seed=1, options={"level": 2}) == (first, info)
        assert (await env.step("print"))[0] == "count 1"
        info = (await env.step("odd info"))[4]
        assert (info["nan"], info["set"]) == (None, [1])
        assert "Faulty" in info["class"]
        with pytest.raises(ValueError, match="surrogate"):
            await env.step("\ud800")
        with pytest.raises(NotImplementedError, match="no expert"):
            await env.plan()
        assert sandbox_of(env).process is process


async def test_process_that_dies_hangs_or_sends_garbage_is_replaced(local):
    async with sandboxed(local, redundancy=Redundancy(recovery="retry")) as env:
        first = await env.reset(seed=1)
        for action, error, text in [
            ("die", EnvCrashed, "ended with 7"),
            ("garbage", EnvContractError, "not a frame"),
            ("hang", EnvTimeout, "1 s"),
        ]:
            process = sandbox_of(env).process
            env._step_timeout = 1.0 if action == "hang" else 120.0
            with pytest.raises(error, match=text):
                await env.step(action)
            with pytest.raises(EnvCrashed, match="call reset first"):
                await env.step("again")
            assert await env.reset(seed=1) == first
            assert sandbox_of(env).process is not process


async def test_a_sandbox_that_is_removed_in_mid_step_is_a_crash_at_once(local):
    async with sandboxed(local, redundancy=Redundancy(recovery="retry")) as env:
        first = await env.reset(seed=1)
        step = asyncio.ensure_future(env.step("hang"))
        await asyncio.sleep(0.5)
        await sandbox_of(env).process._box.close()
        started = time.perf_counter()
        with pytest.raises(EnvCrashed):
            await step
        assert time.perf_counter() - started < 60
        assert await env.reset(seed=1) == first


async def test_replay_goes_on_exactly_where_the_sandbox_was_lost(local):
    actions = [*"abc", "KILL", *"def"]
    here = faulty_envs.Faulty()
    expected = [here.reset(seed=4), *(here.step(action) for action in actions)]
    async with sandboxed(local, redundancy=Redundancy(recovery="replay")) as env:
        seen: list[Any] = [await env.reset(seed=4)]
        for action in actions:
            if action == "KILL":
                await sandbox_of(env).process._process.kill()
            seen.append(await env.step(action))
        assert seen == expected
        assert env._env.recoveries == 1

        await env.reset(seed=4)
        await env.step("chance")
        await sandbox_of(env).process._process.kill()
        with pytest.raises(EnvCrashed, match="differs at call 1"):
            await env.step("a")


async def test_only_a_deterministic_environment_is_replayed(local):
    async with sandboxed(local, "Moody-v0", redundancy=Redundancy(recovery="replay")) as env:
        with pytest.raises(ConfigError, match="not deterministic"):
            await env.reset(seed=0)


async def test_inline_environments_share_a_process_and_not_their_failures(local):
    agreed = place("Faulty-v0", {}, local)
    allocator = SandboxAllocator(agreed, Redundancy(recovery="retry", share=3))
    envs = [SandboxedEnv("Faulty-v0", allocator=allocator, **PATIENT) for _ in range(4)]
    try:
        await asyncio.gather(*(env.reset(seed=1) for env in envs))
        pids = [int((await env.step("pid"))[0]) for env in envs]
        sandboxes = {id(sandbox_of(env)) for env in envs}
        assert len(sandboxes) == 2
        assert len(pids) == 4
        with pytest.raises(EnvCrashed):
            await envs[0].step("raise")
        with pytest.raises(EnvCrashed, match="call reset first"):
            await envs[0].step("a")
        await envs[0].reset(seed=1)
        interrupted = asyncio.ensure_future(envs[1].step("a"))
        await asyncio.sleep(0)
        interrupted.cancel()
        await asyncio.wait({interrupted})
        await envs[1].close()
        assert (await envs[2].step("a"))[0] == "count 2"
        neighbour = next(env for env in envs[2:] if sandbox_of(env) is sandbox_of(envs[0]))
        with pytest.raises(EnvCrashed, match="ended with 7"):
            await envs[0].step("die")
        with pytest.raises(EnvCrashed, match="ended with 7"):
            await neighbour.step("a")
        await asyncio.gather(*(env.reset(seed=1) for env in envs))
        assert (await neighbour.step("a"))[0] == "count 1"
    finally:
        await asyncio.gather(*(env.close() for env in envs))
        await allocator.close()


async def test_frozen_sandbox_ends_only_its_own_steps(local):
    agreed = place("Faulty-v0", {}, local)
    allocator = SandboxAllocator(agreed, Redundancy(recovery="retry", share=64, spread=2))
    envs = [SandboxedEnv("Faulty-v0", allocator=allocator, **PATIENT) for _ in range(4)]
    try:
        for env in envs:
            await env.reset(seed=1)
        sandboxes = [id(sandbox_of(env)) for env in envs]
        assert sorted(sandboxes.count(one) for one in set(sandboxes)) == [1, 1, 2]
        victims = [env for env in envs if sandboxes.count(id(sandbox_of(env))) == 2]
        others = [env for env in envs if env not in victims]
        state = local_state.load(sandbox_of(victims[0]).process._box.id)
        assert state is not None
        main = psutil.Process(state.processes[-1].pid)
        for process in [main, *main.children(recursive=True)]:
            process.suspend()
        start = time.monotonic()
        told: list[Any] = await asyncio.gather(*(env.step("a") for env in envs), return_exceptions=True)
        took = time.monotonic() - start
        assert [type(told[envs.index(env)]) for env in victims] == [EnvCrashed, EnvCrashed]
        assert [told[envs.index(env)][0] for env in others] == ["count 1", "count 1"]
        assert took < 5 * PATIENCE
        assert all("hung" in str(told[envs.index(env)]) for env in victims)
        await asyncio.gather(*(env.reset(seed=1) for env in victims))  # in another sandbox
        assert [(await env.step("a"))[0] for env in victims] == ["count 1", "count 1"]
    finally:
        await asyncio.gather(*(env.close() for env in envs))
        await allocator.close()


async def test_environments_that_are_not_inline_have_a_sandbox_each(local):
    agreed = place("Alone-v0", {}, local)
    allocator = SandboxAllocator(agreed, Redundancy(share=3))
    envs = [SandboxedEnv("Alone-v0", allocator=allocator, **PATIENT) for _ in range(2)]
    await asyncio.gather(*(env.reset(seed=1) for env in envs))
    assert sandbox_of(envs[0]) is not sandbox_of(envs[1])
    await asyncio.gather(*(env.close() for env in envs))
    assert len(allocator._sandboxes) == 2  # kept, for the next
    await envs[0].reset(seed=1)
    await allocator.close()


LIES = {
    "unasked": "write(1, encode([1, 'ok', None]) * 2)",
    "unknown kind": "write(1, encode([1, 'os.system', 'x', '']))",
    "no list": "write(1, encode({'class': 'builtins.eval'}))",
    "endless": "write(1, b'\\x01\\xff\\xff\\xff\\xff')",
    "not json": "write(1, b'\\x01\\x00\\x00\\x00\\x02{]')",
    "infinite": "write(1, b'\\x01\\x00\\x00\\x00\\x07[1e999]')",
    "picture": "write(1, b'\\x02\\x00\\x00\\x00\\x09' + b'\\xff' * 9)",
}


async def test_invalid_messages_of_a_process_are_rejected(local):
    async with sandboxed(local) as env:
        await env.start()
        box = sandbox_of(env).process._box
        for name, lie in LIES.items():
            code = f"from os import read, write\nfrom agentkit.envs.isolation.protocol import encode\nread(0, 9)\n{lie}"
            process = await EnvProcess.start(box, [sys.executable, "-c", f"{code}\nread(0, 9999)"])
            try:
                if name == "unasked":
                    assert await process.call(0, "x", timeout=120) is None
                with pytest.raises(EnvContractError, match="process sent"):
                    await process.call(0, "x", timeout=120)
            finally:
                await process.close()


def test_a_step_costs_little():
    """The bound is for a busy machine; the figure itself is measured by the benchmark of sandboxes."""
    with contextlib.closing(SandboxedTextEnv("FrozenLake-v1", sandbox="local")) as env:
        env.reset(seed=0)
        times = []
        for _ in range(200):
            start = time.perf_counter()
            env.step("nonsense")
            times.append(time.perf_counter() - start)
        assert sorted(times)[50] < 0.5
