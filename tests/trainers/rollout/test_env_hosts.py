"""Handles of environments: validation, time limits, kills, and no leftover processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import gone
from rollout_envs import CONTRACT, AsyncPuppet, Puppet

from agentkit.errors import ConfigError, EnvContractError, EnvCrashed, EnvTimeout
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.source import EnvSource

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parents[1])]


def source(where: str, cls: type = Puppet, *, step: float = 5.0, reset: float = 20.0, **kwargs: Any) -> EnvSource:
    return EnvSource("Puppet-v0", cls, kwargs, where, "", 20, 3, step, reset)  # type: ignore[arg-type]


_before: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _remember_who_is_there() -> None:
    """Ignore processes of other tests, such as a tracker's service."""
    _before.clear()
    _before.update(psutil.Process().children(recursive=True))


def started(*, recursive: bool = True) -> list[psutil.Process]:
    """Processes that this test has started and that still run."""
    return [child for child in psutil.Process().children(recursive=recursive) if child not in _before]


def pid_of(text: str) -> int:
    match = re.search(r"pid (\d+)", text)
    assert match
    return int(match.group(1))


WHERE = ["inline", "thread", "process"]


@pytest.mark.parametrize("where", WHERE)
async def test_an_episode_and_another_in_the_same_environment(where: str) -> None:
    pool = EnvPool(source(where))
    env = pool.acquire()
    assert (await env.reset(7)).startswith("seed 7 count 0 resets 1")
    result = await env.act(("Go",))
    assert (result.reward, result.terminated, result.valid) == (0.0, False, True)
    result = await env.act(("Go", "Go", "Go", "Go"))  # ends at the third step of all
    assert (result.terminated, result.observation.split(" pid")[0]) == (True, "seed 7 count 3 resets 1")
    pool.release(env)
    again = pool.acquire()
    assert again is env
    assert " resets 2" in await again.reset(7)
    assert pool.acquire(fresh=True) is not env
    pool.release(again)
    await pool.close()
    await pool.close()


@pytest.mark.parametrize("where", WHERE)
async def test_actions_after_one_that_does_not_exist_are_not_taken(where: str) -> None:
    pool = EnvPool(source(where, length=9))
    env = pool.acquire()
    await env.reset(0)
    result = await env.act(("Go", "Bad", "Go"))
    assert not result.valid
    assert " count 2" in result.observation
    pool.release(env)
    await pool.close()


@pytest.mark.parametrize(
    ("where", "how"), [*((where, how) for where in WHERE[:2] for how in CONTRACT), ("process", "nan")]
)
async def test_invalid_results_are_named(where: str, how: str) -> None:
    pool = EnvPool(source(where, how=how))
    env = pool.acquire()
    await env.reset(0)
    with pytest.raises(EnvContractError, match="step returned"):
        await env.act(("Go",))
    pool.release(env, failed=True)
    await pool.close()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("how", "fail_in"), [("crash", "step"), ("exit", "step"), ("x", "reset"), ("x", "init")])
async def test_exception_is_a_crash_with_its_location(where: str, how: str, fail_in: str) -> None:
    pool = EnvPool(source(where, how=how, fail_in=fail_in))
    env = pool.acquire()

    async def one_turn() -> None:
        await env.reset(0)
        await env.act(("Go",))

    with pytest.raises(EnvCrashed, match=r"(KeyError|SystemExit).*rollout_envs\.py:\d+"):
        await one_turn()
    pool.release(env, failed=True)
    await pool.close()


@pytest.mark.parametrize("how", ["hang", "spin"])
async def test_a_hung_process_is_killed_and_replaced(how: str) -> None:
    pool = EnvPool(source("process", how=how, step=0.3))
    env = pool.acquire()
    pid = pid_of(await env.reset(0))
    start = time.monotonic()
    with pytest.raises(EnvTimeout, match=r"longer than 0\.3 s"):
        await env.act(("Go",))
    assert time.monotonic() - start < 2.0
    pool.release(env, failed=True)
    fresh = pool.acquire(fresh=True)
    other = pid_of(await fresh.reset(0))
    assert other != pid
    assert gone(pid)
    pool.release(fresh)
    await pool.close()
    assert gone(other)


@pytest.mark.parametrize("how", ["die", "segfault"])
async def test_a_process_that_dies_is_a_crash(how: str) -> None:
    pool = EnvPool(source("process", how=how))
    env = pool.acquire()
    await env.reset(0)
    with pytest.raises(EnvCrashed, match="process died"):
        await env.act(("Go",))
    pool.release(env, failed=True)
    await pool.close()
    assert not started()


async def test_child_processes_end_with_the_environment() -> None:
    pool = EnvPool(source("process", how="grandchild"))
    env = pool.acquire()
    await env.reset(0)
    text = (await env.act(("Go",))).observation
    child = int(text.rsplit(" ", 1)[1])
    assert psutil.pid_exists(child)
    pool.release(env, failed=True)
    await pool.close()
    assert gone(child)


async def test_cancelling_a_call_kills_the_process() -> None:
    pool = EnvPool(source("process", how="hang", step=60.0))
    env = pool.acquire()
    pid = pid_of(await env.reset(0))
    call = asyncio.ensure_future(env.act(("Go",)))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert env.busy
    pool.release(env)
    await asyncio.sleep(0.05)
    assert gone(pid)
    assert pool.acquire() is not env
    await pool.close()


async def test_dead_fork_server_is_replaced() -> None:
    pool = EnvPool(source("process"))
    env = pool.acquire()
    pid = pid_of(await env.reset(0))
    (server,) = [child for child in started(recursive=False) if child.pid != pid]
    server.kill()
    assert gone(pid)  # by the kernel, with its parent
    with pytest.raises(EnvCrashed):
        await env.act(("Go",))
    pool.release(env, failed=True)
    env = pool.acquire()
    await env.reset(1)
    pool.release(env)
    await pool.close()
    assert not started()


async def test_many_processes_start_at_once() -> None:
    pool = EnvPool(source("process"))
    envs = [pool.acquire() for _ in range(16)]
    texts = await asyncio.gather(*(env.reset(seed) for seed, env in enumerate(envs)))
    assert [text.split(" count")[0] for text in texts] == [f"seed {seed}" for seed in range(16)]
    assert len({pid_of(text) for text in texts}) == 16
    for env in envs:
        pool.release(env)
    await pool.close()
    assert not started()


async def test_a_hung_thread_is_abandoned() -> None:
    pool = EnvPool(source("thread", how="hang", step=0.1))
    env = pool.acquire()
    await env.reset(0)
    with pytest.raises(EnvTimeout, match="abandoned"):
        await env.act(("Go",))
    pool.release(env, failed=True)
    await pool.close()


async def test_overrun_of_an_inline_environment_is_reported() -> None:
    env = EnvPool(source("inline", pause=0.05, step=0.01)).acquire()
    await env.reset(0)
    with pytest.raises(EnvTimeout, match=r"set env\.concurrency"):
        await env.act(("Go",))


async def test_asynchronous_environments_are_awaited_and_bounded() -> None:
    pool = EnvPool(source("async", AsyncPuppet))
    env = pool.acquire()
    assert await env.reset(3) == "seed 3"
    result = await env.act(("Go", "Go", "Go"))
    assert (result.terminated, result.success, result.reward) == (True, True, 1.0)
    pool.release(env)
    for how in ("hang", "stubborn"):
        pool_ = EnvPool(source("async", AsyncPuppet, how=how, step=0.1))
        env = pool_.acquire()
        await env.reset(0)
        start = time.monotonic()
        with pytest.raises(EnvTimeout):
            await env.act(("Go",))
        assert time.monotonic() - start < 0.5
        before = AsyncPuppet.closed
        pool_.release(env, failed=True)
        await pool_.close()
        assert AsyncPuppet.closed == before + 1
    env = EnvPool(source("async", AsyncPuppet, how="nan")).acquire()
    await env.reset(0)
    with pytest.raises(EnvContractError):
        await env.act(("Go",))
    await pool.close()


async def test_class_that_a_worker_cannot_import_is_rejected() -> None:
    class Local(Puppet):
        pass

    with pytest.raises(ConfigError, match="top level of a module"):
        await EnvPool(source("process", Local)).acquire().reset(0)


def script(body: str) -> list[str]:
    head = f"import asyncio, sys, time; sys.path[:0] = {PATHS!r}\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


BUSY = """
from test_env_hosts import source, EnvPool
async def main():
    pool = EnvPool(source({where!r}, how="hang", step=600.0))
    env = pool.acquire()
    print(await env.reset(0), flush=True)
    call = asyncio.ensure_future(env.act(("Go",)))
    await asyncio.sleep({wait})
asyncio.run(main())
"""


def test_nothing_survives_the_death_of_the_parent() -> None:
    parent = subprocess.Popen(script(BUSY.format(where="process", wait=600)), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = pid_of(parent.stdout.readline())
    family = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
    assert pid in family
    assert len(family) == 2
    time.sleep(0.1)  # into the hanging step
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(gone(member) for member in family)


def test_an_abandoned_thread_does_not_delay_the_exit() -> None:
    start = time.monotonic()
    done = subprocess.run(
        script(BUSY.format(where="thread", wait=0.1)), timeout=30, check=True, capture_output=True, text=True
    )
    assert "seed 0" in done.stdout
    assert time.monotonic() - start < 15


def test_an_environment_of_the_users_own_script_runs_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path[:0] = {PATHS!r}
        from rollout_envs import Puppet
        class Mine(Puppet):
            pass
        if __name__ == "__main__":
            from test_env_hosts import source, EnvPool
            async def main():
                pool = EnvPool(source("process", Mine))
                env = pool.acquire()
                print(await env.reset(5))
                pool.release(env)
                await pool.close()
            asyncio.run(main())
        """)
    )
    done = subprocess.run([sys.executable, str(path)], timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("seed 5")
    assert done.stdout.count("\n") == 1
