"""What befalls sandboxes: being made, taken from a pool, killed, replaced, left behind by their owner, and idle."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from docker import DockerClient

from agentkit.errors import SandboxLost
from agentkit.sandboxes import Sandbox, SandboxPool, SandboxSpec, Supervisor
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends.docker_options import container
from benchmarks.sandbox.figures import Figure, p, timed
from benchmarks.sandbox.hot import TRUE

OWNER = """
import asyncio, sys
from agentkit.sandboxes import Sandbox

async def main(label, count):
    boxes = [await Sandbox.create(labels={"benchmark": label}) for _ in range(count)]
    print("ready", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def create(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """Sandboxes until they are ready to work, and the same containers, without an agent, until they are started."""

    def bare(directory: str) -> float:
        body = container(SandboxSpec(), SandboxSpec().image, directory, {}, "exec", ())
        begin = time.perf_counter()
        made = client.api.create_container_from_config(body)
        client.api.start(made)
        taken = 1e3 * (time.perf_counter() - begin)
        client.api.remove_container(made, force=True)
        return taken

    ours, engine, closed = [], [], []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(count):
            engine.append(await asyncio.to_thread(bare, directory))
            begin = time.perf_counter()
            box = await Sandbox.create(backend=backend)
            ours.append(1e3 * (time.perf_counter() - begin))
            closed.append(await timed(box.close()))
    return [
        Figure("cold create until ready to work, p50", p(ours, 50), "ms"),
        Figure("the bare engine's create and start, p50", p(engine, 50), "ms"),
        Figure("cold create beyond the bare engine, p50", p(ours, 50) - p(engine, 50), "ms", 35, "≤"),
        Figure("close, p50", p(closed, 50), "ms"),
    ]


async def _as_it_is(_: Sandbox) -> None:
    """Taking is measured, not what may be done between two uses."""


async def acquire(backend: Backend, warm: Literal["running", "paused"], count: int) -> list[Figure]:
    times = []
    async with SandboxPool(None, backend, min_idle=4, max_size=4, warm=warm, max_uses=None, reset=_as_it_is) as pool:
        for _ in range(count):
            await pool.filled()
            begin = time.perf_counter()
            lease = await pool.take()
            times.append(1e3 * (time.perf_counter() - begin))
            lease.release()
    return [
        Figure(f"warm acquire ({warm}), p50", p(times, 50), "ms"),
        Figure(f"warm acquire ({warm}), p95", p(times, 95), "ms", {"running": 5, "paused": 15}[warm]),
    ]


async def crash(boxes: Sequence[Sandbox], client: DockerClient) -> list[Figure]:
    """From the call of ``docker kill`` until the sandbox's state says so."""
    times = []
    for box in boxes:
        ill = asyncio.Event()
        box.watch(lambda change, ill=ill: ill.set())
        killing = asyncio.create_task(asyncio.to_thread(client.api.kill, box.id))
        times.append(await timed(asyncio.wait_for(ill.wait(), 60)))
        assert box.state == "unhealthy"
        await killing
    return [Figure("crash detected, p95", p(times, 95), "ms", 100)]


async def recovery(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """From the call of ``docker kill`` until the next command has run, in a sandbox of the warm pool."""
    times = []
    async with SandboxPool(None, backend, min_idle=2, max_size=4) as pool:
        supervisor = Supervisor(pool, recovery="replay")
        for _ in range(count):
            async with supervisor.run() as box:
                await box.exec(TRUE)
                await pool.filled()
                begin = time.perf_counter()
                await asyncio.to_thread(client.api.kill, box.status.id)
                while not box.recoveries:
                    with contextlib.suppress(SandboxLost):
                        await box.exec(TRUE)
                times.append(time.perf_counter() - begin)
    return [Figure("recovery from the warm pool, p95", p(times, 95), "s", 1)]


def orphans(client: DockerClient, count: int) -> list[Figure]:
    """Until nothing is left of an owner that SIGKILL ended."""
    label = secrets.token_hex(8)

    def left() -> int:
        return len(client.api.containers(all=True, filters={"label": f"agentkit.user.benchmark={label}"}))

    owner = subprocess.Popen([sys.executable, "-c", OWNER, label, str(count)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    made = owner.stdout.readline() and left()
    owner.kill()
    begin = time.monotonic()
    owner.wait()
    assert made == count, f"the owner made {made} sandboxes"
    while left():
        assert time.monotonic() - begin < 300, f"{left()} sandboxes are left after five minutes"
        time.sleep(0.05)
    return [Figure(f"nothing left of a killed owner's {count} sandboxes after", time.monotonic() - begin, "s", 30)]


async def density(backend: Backend, count: int) -> list[Figure]:
    """How much less memory this machine has with ``count`` idle sandboxes, all of which answer."""
    before = _available()
    boxes = await asyncio.gather(*(Sandbox.create(backend=backend) for _ in range(count)))
    try:
        await asyncio.sleep(1)
        each = (before - _available()) / count
        for box in boxes:
            await box.exec(TRUE, check=True)
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
    return [
        Figure(f"memory of an idle sandbox, {count} of them made", each / 2**20, "MiB"),
        Figure("idle sandboxes in 2 GiB", 2 * 2**30 / each, "", 150, "≥"),
    ]


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
