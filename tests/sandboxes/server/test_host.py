"""The machine of a sandbox server: watermarks and draining."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from agentkit.errors import QuotaExceeded
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.pool.health import HostUsage
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.config import ServerConfig
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.server.policy import Quota, Watermarks
from agentkit.sandboxes.testing.fake import FakeBackend

TOKEN = "a-token-of-the-tests-alone"
SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))
EMPTY = HostUsage(memory=0.1, disk=0.1, cpu=0.1)


class Machine:
    """A machine whose use is what the test sets."""

    def __init__(self) -> None:
        self.usage = EMPTY

    def __call__(self) -> HostUsage:
        return self.usage


@contextlib.asynccontextmanager
async def served(machine: Machine) -> AsyncIterator[tuple[SandboxServer, RemoteBackend]]:
    config = ServerConfig(quota=Quota(disconnected_seconds=1.0))  # so the machine is measured every 0.25 s
    async with SandboxServer(FakeBackend(create_seconds=0.01), token=TOKEN, config=config, measure=machine) as server:
        backend = RemoteBackend(server.url, TOKEN)
        await backend.start()
        yield server, backend
        await backend.close()


async def refused(backend: RemoteBackend) -> str:
    """Return why the server creates no sandbox; empty if it does."""
    try:
        async with Sandbox.create(SMALL, backend=backend):
            return ""
    except QuotaExceeded as error:
        return str(error) if (error.retryable, error.side_effects) == (True, "none") else ""


def test_a_short_burst_of_the_processors_is_not_pressure() -> None:
    machine = Machine()
    host = Host(Watermarks(cpu=0.9).shares(), machine)
    machine.usage = HostUsage(memory=0.1, disk=0.1, cpu=1.0)
    host.update()
    assert host.reason == ""
    for _ in range(10):
        host.update()
    assert "cpu" in host.reason
    machine.usage = EMPTY
    for _ in range(10):
        host.update()
    assert host.describe() == {**vars(host.usage), "accepting": True, "reason": ""}


@pytest.mark.parametrize("usage", [HostUsage(memory=0.95, disk=0.1), HostUsage(memory=0.1, disk=0.95)])
async def test_nothing_is_created_above_a_watermark(usage: HostUsage) -> None:
    machine = Machine()
    async with served(machine) as (server, backend), Sandbox.create(SMALL, backend=backend) as box:
        machine.usage = usage
        end = time.monotonic() + 10
        while not (reason := await refused(backend)):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert "95%" in reason
        assert (await box.exec("echo on")).stdout == "on\n"
        assert server.sessions.report()["host"]["accepting"] is False
        machine.usage = EMPTY
        while await refused(backend):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


async def test_a_draining_server_keeps_its_sandboxes() -> None:
    async with served(Machine()) as (server, backend), Sandbox.create(SMALL, backend=backend) as box:
        server.tenants.drain(True)
        assert "draining" in await refused(backend)
        assert (await box.exec("echo on")).stdout == "on\n"
        assert server.sessions.report()["load"] == (1, 256)
        server.tenants.drain(False)
        end = time.monotonic() + 20
        while await refused(backend):  # until the client knows of it
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
