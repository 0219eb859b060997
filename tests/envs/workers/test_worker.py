"""Worker processes: bounded calls, kills of whole groups, and fresh processes after failures; sync and async."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import gone

from agentkit.envs.workers.client import ForkServer, shared_server
from agentkit.envs.workers.worker import Worker
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout

HERE = str(Path(__file__).parent)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.syspath_prepend(HERE)
    server = ForkServer("counting_worker")
    yield server
    server.close()


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``await call(worker, name, ...)`` calls a worker in one of the two ways."""

    async def perform(worker: Worker, name: str, *arguments: Any, timeout: float = 20.0) -> Any:
        result = (worker.call if request.param == "sync" else worker.call_async)(name, *arguments, timeout=timeout)
        return await result if inspect.isawaitable(result) else result

    return perform


async def test_state_is_kept_between_calls(server: ForkServer, call: Any) -> None:
    worker = Worker(server)
    assert not worker.alive
    assert [await call(worker, "count") for _ in range(3)] == [("ok", 1), ("ok", 2), ("ok", 3)]
    assert worker.alive
    worker.kill()
    worker.kill()
    assert not worker.alive
    assert await call(worker, "count") == ("ok", 1)


async def test_large_messages_arrive_whole(server: ForkServer, call: Any) -> None:
    assert await call(Worker(server), "echo", "é" * 1_000_000, 2) == ("ok", "é" * 2_000_000)
    with pytest.raises(EnvContractError, match="the reply to echo is a frame of"):
        await call(Worker(server), "echo", "x", 65 << 20)


async def test_slow_call_kills_the_process(server: ForkServer, call: Any) -> None:
    worker = Worker(server)
    await call(worker, "count")
    pid, start = worker.pid, time.monotonic()
    assert pid is not None
    with pytest.raises(EnvTimeout, match=r"hang took longer than 0\.2 s"):
        await call(worker, "hang", timeout=0.2)
    assert time.monotonic() - start < 2
    assert gone(pid)
    assert await call(worker, "count") == ("ok", 1)


@pytest.mark.parametrize("how", ["die", "raise"])
async def test_process_that_dies_is_a_crash(server: ForkServer, call: Any, how: str) -> None:
    worker = Worker(server)
    with pytest.raises(EnvCrashed, match="its process died"):
        await call(worker, how, "a message")
    assert await call(worker, "count") == ("ok", 1)


async def test_group_is_killed(server: ForkServer, call: Any) -> None:
    worker = Worker(server)
    _, pid = await call(worker, "grandchild")
    assert psutil.pid_exists(pid)
    worker.kill()
    assert gone(pid)


async def test_killed_processes_are_reaped(server: ForkServer, call: Any) -> None:
    worker = Worker(server)
    await call(worker, "count")
    assert worker.pid is not None
    parent = psutil.Process(worker.pid).parent()
    assert parent is not None
    worker.kill()
    deadline = time.monotonic() + 10
    while parent.children():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_dead_server_is_replaced(server: ForkServer, call: Any) -> None:
    worker = Worker(server)
    await call(worker, "count")
    assert worker.pid is not None
    parent = psutil.Process(worker.pid).parent()
    assert parent is not None
    parent.kill()
    assert gone(worker.pid)
    with pytest.raises(EnvCrashed):
        await call(worker, "count")
    assert await call(worker, "count") == ("ok", 1)


async def test_module_that_cannot_be_imported(call: Any) -> None:
    server = ForkServer("no_such_module")
    with pytest.raises(EnvCrashed, match="the process for no_such_module did not start"):
        await call(Worker(server), "count")
    server.close()


async def test_start_is_bounded(server: ForkServer, call: Any) -> None:
    first = Worker(server)
    await call(first, "count")
    assert first.pid is not None
    parent = psutil.Process(first.pid).parent()
    assert parent is not None
    os.kill(parent.pid, signal.SIGSTOP)
    with pytest.raises(EnvCrashed, match=r"started within 0\.2 s"):
        await call(Worker(server, start_timeout=0.2), "count")
    os.kill(parent.pid, signal.SIGCONT)
    assert await call(Worker(server), "count") == ("ok", 1)
    deadline = time.monotonic() + 10
    while len(parent.children()) > 2:  # the late process of the abandoned call has been killed
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_cancelled_call_kills_the_process(server: ForkServer) -> None:
    worker = Worker(server)
    await worker.call_async("count", timeout=20)
    pid = worker.pid
    assert pid is not None
    task = asyncio.ensure_future(worker.call_async("hang", timeout=60))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pid)
    assert await worker.call_async("count", timeout=20) == ("ok", 1)


async def test_kill_ends_a_call_in_progress(server: ForkServer) -> None:
    worker = Worker(server)
    await worker.call_async("count", timeout=20)
    task = asyncio.ensure_future(worker.call_async("hang", timeout=60))
    await asyncio.sleep(0.05)
    worker.kill()
    with pytest.raises(EnvCrashed):
        await asyncio.wait_for(task, 5)


def test_forked_copy_leaves_its_parents_worker_alone(server: ForkServer) -> None:
    worker = Worker(server)
    worker.call("count", timeout=20)
    copy = os.fork()
    if copy == 0:
        try:
            worker.kill()
            os._exit(0 if not worker.alive else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
    assert worker.call("count", timeout=20) == ("ok", 2)


def test_threads_start_workers_at_once(server: ForkServer) -> None:
    workers = [Worker(server) for _ in range(16)]
    threads = [threading.Thread(target=worker.call, args=("count",), kwargs={"timeout": 20}) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({worker.pid for worker in workers}) == 16
    assert [worker.call("count", timeout=20) for worker in workers] == [("ok", 2)] * 16


def test_starting_takes_milliseconds(server: ForkServer) -> None:
    Worker(server).call("count", timeout=20)
    start = time.perf_counter()
    for _ in range(20):
        Worker(server).call("count", timeout=20)
    assert (time.perf_counter() - start) / 20 < 0.1


def test_servers_are_shared_by_module() -> None:
    assert shared_server("counting_worker") is shared_server("counting_worker")
