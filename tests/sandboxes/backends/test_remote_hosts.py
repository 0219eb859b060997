"""One client with several sandbox servers that are lost, silent, late, draining or back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from relay import relayed
from server_process import TOKEN, ServerProcess

from agentkit.errors import EngineUnavailable, QuotaExceeded, SandboxLost
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.paths import new_id
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.testing.fake import FakeBackend

SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))
SLACK = 20.0
REFUSED, SILENT = 0.5, 5.0
"""Promised seconds until the loss of a host is noticed."""
BUSY = 3.0
"""Seconds by which this machine may be late, since other tests run at the same time."""


@contextlib.asynccontextmanager
async def connected(*urls: str) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend(list(urls), TOKEN)
    await backend.start()
    try:
        yield backend
    finally:
        began = time.monotonic()
        await backend.close()
        assert time.monotonic() - began < BUSY


@contextlib.asynccontextmanager
async def served(number: int) -> AsyncIterator[list[SandboxServer]]:
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeBackend(create_seconds=0.02, call_seconds=0.0) for _ in range(number)]
        yield [await stack.enter_async_context(SandboxServer(fake, token=TOKEN)) for fake in fakes]


async def until(condition: Callable[[], bool], timeout: float = SLACK) -> float:
    """Wait for a condition; return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def state_of(backend: RemoteBackend, host: str) -> str:
    return next(status.state for status in backend.hosts() if status.host == host)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    servers = [ServerProcess(tmp_path / name, "'local'") for name in ("one", "two")]
    yield servers
    for server in servers:
        server.end(signal.SIGTERM)


async def on_host(backend: RemoteBackend, host: str) -> Sandbox:
    others = [status.host for status in backend.hosts() if status.host != host]
    box = await Sandbox.create(SMALL, backend=backend, avoid_hosts=others)
    assert backend.host_of(box.id) == host
    return box


class Work:
    """Calls of all kinds that wait for a sandbox."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    async def start(self) -> None:
        await self._box.exec("mkfifo never; echo > file")
        watched = await self._box.spawn("sleep 1000", timeout=2000)
        written = await self._box.spawn("cat", timeout=2000)

        async def iterate() -> None:
            async for _ in watched:
                pass

        async def write() -> None:
            while True:
                await written.write(b"x" * 1000)

        async def read() -> None:
            while True:
                await self._box.files.read("file")

        calls = [self._box.exec("sleep 1000", timeout=2000), watched.wait(), iterate(), written.wait(), write(), read()]
        self._tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in self._tasks)

    async def lost(self, timeout: float) -> float:
        """Wait until all have ended because of the loss of the host; return the seconds until the last one did."""
        began = time.monotonic()
        for task in self._tasks:
            with pytest.raises(SandboxLost) as caught:
                await asyncio.wait_for(task, timeout)
            assert caught.value.details["reason"] == "engine_down"
        return time.monotonic() - began


async def calls_of(box: Sandbox, backend: RemoteBackend, stop: asyncio.Event) -> float:
    """Use a healthy host until ``stop``; return the seconds of the slowest call."""
    slowest = 0.0
    while not stop.is_set():
        began = time.monotonic()
        assert (await box.exec("echo on")).stdout == "on\n"
        assert (await backend.inspect(box.id)).state == "running"
        slowest = max(slowest, time.monotonic() - began)
        await asyncio.sleep(0.05)
    return slowest


async def test_a_host_whose_server_is_killed_is_lost_at_once(servers: list[ServerProcess]) -> None:
    one, two = servers
    async with connected(one.url, two.url) as backend:
        lost, kept = await on_host(backend, one.host), await on_host(backend, two.host)
        work, stop = Work(lost), asyncio.Event()
        await work.start()
        healthy = asyncio.ensure_future(calls_of(kept, backend, stop))
        began = time.monotonic()
        one.end()
        listed = {seen.id for seen in await backend.list({})}
        assert (lost.id in listed, lost.loss) == (False, "engine_down")  # never missing before it is lost
        assert await work.lost(SLACK) < REFUSED + BUSY
        replacement = await Sandbox.create(SMALL, backend=backend)
        assert backend.host_of(replacement.id) == two.host
        assert time.monotonic() - began < 1.0 + BUSY
        assert [seen.id for seen in await backend.list({})].count(kept.id) == 1
        await lost.close()
        await backend.remove(new_id())  # the server that is down might have it
        with pytest.raises(EngineUnavailable):
            await backend.inspect(lost.id)
        stop.set()
        assert await healthy < 0.5 + BUSY
        assert state_of(backend, one.host) == "down"
        await kept.close()
        await replacement.close()


async def test_a_host_whose_server_stops_is_lost_at_once(servers: list[ServerProcess]) -> None:
    one, two = servers
    async with connected(one.url, two.url) as backend:
        box = await on_host(backend, one.host)
        work = Work(box)
        await work.start()
        one.send(signal.SIGINT)
        assert await work.lost(SLACK) < REFUSED + BUSY
        with pytest.raises(SandboxLost, match="engine_down"):
            await box.exec("true")
        replacement = await Sandbox.create(SMALL, backend=backend)  # the server may still answer
        assert backend.host_of(replacement.id) == two.host
        await replacement.close()
        await box.close()
        assert await until(lambda: state_of(backend, one.host) == "down") < BUSY


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "dropped"])
async def test_a_silent_host_is_lost_in_five_seconds(fault: str, servers: list[ServerProcess]) -> None:
    one, two = servers
    async with relayed(one.host) as relay, connected(relay.url, two.url) as backend:
        host = relay.url.removeprefix("http://")

        def silence(silent: bool) -> None:
            if fault == "stopped":
                one.send(signal.SIGSTOP if silent else signal.SIGCONT)
            else:
                relay.stall() if silent else relay.resume()

        lost, kept = await on_host(backend, host), await on_host(backend, two.host)
        work, stop = Work(lost), asyncio.Event()
        await work.start()
        healthy = asyncio.ensure_future(calls_of(kept, backend, stop))
        silence(True)
        waiting = asyncio.ensure_future(work.lost(SLACK))
        # Before it counts as down, other hosts are preferred.
        await until(lambda: state_of(backend, host) == "silent")
        replacement = await Sandbox.create(SMALL, backend=backend)
        assert backend.host_of(replacement.id) == two.host
        assert await waiting < SILENT + BUSY
        assert state_of(backend, host) == "down"
        # Nothing waits for it from now on.
        began = time.monotonic()
        await lost.close()
        assert {seen.id for seen in await backend.list({})} == {kept.id, replacement.id}
        assert time.monotonic() - began < 0.5 + BUSY
        stop.set()
        assert await healthy < 0.5 + BUSY
        # When it is back, its sandbox is removed, and it is used again.
        silence(False)
        await until(lambda: state_of(backend, host) == "up")
        await until(lambda: next(status.used for status in backend.hosts() if status.host == host) == 0)
        back = await Sandbox.create(SMALL, backend=backend)
        assert backend.host_of(back.id) == host
        for box in (kept, replacement, back):
            await box.close()


LATE = """
import asyncio, time

class Late(FakeBackend):
    async def start(self):
        await super().start()
        self.blocking = asyncio.ensure_future(self.block())

    async def block(self):
        while True:
            await asyncio.sleep(0.3)
            time.sleep(2.0)
"""


@pytest.mark.slow
async def test_a_server_that_is_late_is_not_lost(tmp_path: Path) -> None:
    """Its event loop stops for two seconds again and again, and four other processes use the processors."""
    server = ServerProcess(tmp_path, "Late()", before=LATE)
    others = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(4)]
    try:
        async with connected(server.url) as backend:
            box = await Sandbox.create(SMALL, backend=backend)
            command = asyncio.ensure_future(box.exec("sleep 20", timeout=60))
            while not command.done():
                assert state_of(backend, server.host) != "down"
                time.sleep(0.4)  # noqa: ASYNC251  # this process is late, too
                await asyncio.sleep(0.1)
            assert (await command).ok
            assert box.loss is None
            await box.close()
    finally:
        for process in others:
            process.kill()
            await process.wait()
        server.end()


async def test_creations_on_a_lost_host_continue_on_another(tmp_path: Path) -> None:
    servers = [ServerProcess(tmp_path / str(seconds), f"FakeBackend(create_seconds={seconds})") for seconds in (30, 0)]
    slow, fast = servers
    try:
        async with connected(slow.url, fast.url) as backend:
            creating = [
                asyncio.ensure_future(Sandbox.create(SMALL, backend=backend, avoid_hosts=(fast.host,)))
                for _ in range(3)
            ]
            await until(lambda: next(s for s in backend.hosts() if s.host == slow.host).used == 0)
            await asyncio.sleep(1.5)
            began = time.monotonic()
            slow.end()
            boxes = await asyncio.gather(*creating)
            assert time.monotonic() - began < 1.0 + BUSY
            assert {backend.host_of(box.id) for box in boxes} == {fast.host}
            for box in boxes:
                await box.close()
    finally:
        for server in servers:
            server.end()


async def test_a_pool_replaces_the_sandboxes_of_a_lost_host_at_once(tmp_path: Path) -> None:
    servers = [ServerProcess(tmp_path / name) for name in ("one", "two")]
    one, two = servers
    try:
        async with connected(one.url, two.url) as backend, SandboxPool(backend=backend, min_idle=4) as pool:
            await pool.wait_filled()
            leases = [await pool.acquire() for _ in range(4)]
            await pool.wait_filled()
            one.end()
            lost = [lease for lease in leases if lease.host == one.host]
            await until(lambda: all(lease.failure for lease in lost))
            began = time.monotonic()
            for lease in lost:
                lease.release()
                lease = await pool.acquire()
                assert lease.host == two.host
                lease.release()
            assert time.monotonic() - began < 1.0 + BUSY
            stats = pool.stats()
            assert (stats.failures, stats.breaker) == (0, "closed")
            assert set(stats.counters.retired) <= {"engine_down", "used"}
            for lease in leases:
                lease.release()
    finally:
        for server in servers:
            server.end()


async def test_several_clients_fill_the_hosts_evenly() -> None:
    async with served(3) as servers, contextlib.AsyncExitStack() as stack:
        urls = [server.url for server in servers]
        clients = [await stack.enter_async_context(connected(*urls)) for _ in range(4)]
        boxes = await asyncio.gather(*(Sandbox.create(SMALL, backend=client) for client in clients for _ in range(15)))
        counts = Counter(box.backend.host_of(box.id) for box in boxes)
        assert len(counts) == 3
        assert max(counts.values()) - min(counts.values()) <= 8
        assert sum(status.sandboxes for status in clients[0].hosts()) == 15
        await until(lambda: sum(status.used for status in clients[0].hosts()) == 60)
        await asyncio.gather(*(box.close() for box in boxes))


async def test_a_draining_host_gets_no_new_sandboxes() -> None:
    async with served(2) as (one, two), connected(one.url, two.url) as backend:
        await until(lambda: all(status.round_trip is not None for status in backend.hosts()))
        host = one.url.removeprefix("http://")
        kept = await on_host(backend, host)
        one.tenants.drain(True)
        await until(lambda: state_of(backend, host) == "unschedulable")
        assert "draining" in backend.hosts()[0].reason
        boxes = [await Sandbox.create(SMALL, backend=backend) for _ in range(4)]
        assert all(backend.host_of(box.id) != host for box in boxes)
        assert (await kept.exec("true")).ok
        two.tenants.drain(True)
        await until(lambda: backend.hosts()[1].state == "unschedulable")
        with pytest.raises(QuotaExceeded, match="draining") as caught:
            await Sandbox.create(SMALL, backend=backend)
        assert (caught.value.retryable, caught.value.side_effects) == (True, "none")
        one.tenants.drain(False)
        await until(lambda: state_of(backend, host) == "up")
        boxes.append(await Sandbox.create(SMALL, backend=backend))
        assert backend.host_of(boxes[-1].id) == host
        for box in [kept, *boxes]:
            await box.close()
