"""Sandboxes that are frozen from outside, on real back ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from docker_boxes import SMALL, WatchedDocker, spec
from local_harness import WatchedLocal, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable, SandboxLost
from agentkit.sandboxes import Resources, Sandbox
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.pool.pool import SandboxPool

__all__ = ["runtime_directory"]

PATIENCE = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))


async def lost_in_time(box: Sandbox, work: asyncio.Future, within: float) -> str:
    """Return the reason of the loss, which must be reported within the documented number of seconds."""
    start = time.monotonic()
    with pytest.raises(SandboxLost) as caught:
        await asyncio.wait_for(work, within * PATIENCE)
    print(f"lost after {time.monotonic() - start:.1f} s (promised {within:g} s): {caught.value}")
    assert box.state == "unhealthy"
    return caught.value.details["reason"]


@pytest.mark.docker
@pytest.mark.timeout(600)
async def test_a_sandbox_that_was_paused_from_outside_is_reported_as_frozen(docker_backend: WatchedDocker) -> None:
    for call, within in (
        (lambda box: box.exec("sleep 60", timeout=2), 4.0),
        (lambda box: box.exec("sleep 60", timeout=0.2), 2.2),
        (lambda box: box.files.read("/etc/passwd"), 5.0),
    ):
        async with Sandbox.create(SMALL, backend=docker_backend) as box:
            await docker_backend.engine.call("pause", lambda client, id=box.id: client.pause(id))
            assert await lost_in_time(box, asyncio.ensure_future(call(box)), within) in ("hung", "frozen")
            await docker_backend.engine.call("resume", lambda client, id=box.id: client.unpause(id))
            with pytest.raises(SandboxLost):
                await box.exec("true")


async def test_a_stopped_agent(runtime_directory: Path) -> None:
    backend = WatchedLocal()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, str(error))
    try:
        async with Sandbox.create(SMALL, backend=backend) as box:
            assert (await box.exec("sleep 5")).ok  # nothing is wrong with one that works
            work = asyncio.ensure_future(box.exec("sleep 600", timeout=900))
            await asyncio.sleep(0.5)
            state = local_state.load(box.id)
            assert state is not None
            for process in psutil.Process(state.processes[-1].pid).children(recursive=True):
                if "agent" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGSTOP)
            os.kill(state.processes[-1].pid, signal.SIGSTOP)
            assert await lost_in_time(box, work, 5.0) == "hung"
        assert backend.left() == []
    finally:
        await backend.close()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_large_transfers_and_busy_sandboxes_do_not_count_as_frozen(docker_backend: WatchedDocker) -> None:
    resources = Resources(memory=1 << 30, tmp=8 << 20, workspace=300 << 20, shm=1 << 20, pids=64, cpus=0.2)
    async with Sandbox.create(spec(resources=resources), backend=docker_backend) as box:
        data = os.urandom(1 << 20) * 100
        await box.exec("for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; sleep 0.1")
        await box.files.write("large", data)
        assert await box.files.read("large", limit=len(data)) == data
        assert (await box.exec("sleep 8; cat large | wc -c", timeout=120)).stdout.strip() == str(len(data))
        late = await box.exec("while :; do :; done", timeout=1)
        assert late.timed_out
        assert box.state == "ready"


@pytest.mark.docker
@pytest.mark.timeout(600)
async def test_the_pause_of_a_snapshot_does_not_count_as_frozen(docker_backend: WatchedDocker) -> None:
    async with SandboxPool(spec(readonly_root=False, user="0:0"), docker_backend, min_idle=0) as pool:
        lease = await pool.acquire()
        await lease.box.exec("head -c 300000000 /dev/urandom >/var/large", timeout=120, check=True)
        snapshot = await lease.box.snapshot()  # the engine pauses the sandbox while it copies the file
        try:
            assert (await lease.box.exec("true")).ok
            assert lease.box.state in ("ready", "degraded")
        finally:
            await Sandbox.discard(snapshot, backend=docker_backend)
            lease.release(discard=True)
