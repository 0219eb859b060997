"""What befalls sandboxes: being made, taken from a pool, killed, replaced, left behind by their owner, and idle."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from agentkit.errors import SandboxLost
from agentkit.sandboxes import Sandbox, SandboxPool, SandboxSpec, Supervisor
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import DEFAULT_IMAGE
from benchmarks.sandbox.figures import Figure, p
from benchmarks.sandbox.hot import TRUE, timed, timed_call
from docker import DockerClient

BARE: dict[str, Any] = {
    "command": ["sleep", "600"],
    "init": True,
    "user": "65534:65534",
    "network_mode": "none",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "read_only": True,
    "mem_limit": "1g",
    "memswap_limit": "1g",
    "nano_cpus": 10**9,
    "pids_limit": 256,
    "tmpfs": {"/tmp": "size=64m", "/workspace": "size=256m"},
}
"""A container as hardened as a sandbox, without an agent."""

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
    """Sandboxes that are ready to work, and bare containers that were started, in turn."""

    def bare() -> float:
        begin = time.perf_counter()
        container = client.containers.create(DEFAULT_IMAGE, **BARE)
        container.start()
        taken = 1e3 * (time.perf_counter() - begin)
        container.remove(force=True)
        return taken

    ours, engine, closed = [], [], []
    for _ in range(count):
        engine.append(await asyncio.to_thread(bare))
        begin = time.perf_counter()
        box = await Sandbox.create(backend=backend)
        ours.append(1e3 * (time.perf_counter() - begin))
        closed.append(await timed(box.close()))
    return [
        Figure("cold create until ready to work, p50", p(ours, 50), "ms"),
        Figure("the bare engine's create and start, p50", p(engine, 50), "ms"),
        Figure("cold create beyond the bare engine", p(ours, 50) - p(engine, 50), "ms", 35, "at most"),
        Figure("close, p50", p(closed, 50), "ms"),
    ]


async def _as_it_is(_: Sandbox) -> None:
    """Taking is measured here, not what may be done between two uses."""


async def acquire(backend: Backend, warm: Literal["running", "paused"], count: int) -> list[Figure]:
    pool = SandboxPool(None, backend, min_idle=4, max_size=4, warm=warm, max_uses=None, reset=_as_it_is)
    times = []
    async with pool:
        for _ in range(count):
            await pool.filled()
            begin = time.perf_counter()
            lease = await pool.take()
            times.append(1e3 * (time.perf_counter() - begin))
            lease.release()
    target = {"running": 5, "paused": 15}[warm]
    return [
        Figure(f"warm acquire ({warm}), p95", p(times, 95), "ms", target),
        Figure(f"warm acquire ({warm}), p50", p(times, 50), "ms"),
    ]


async def crash(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """From the call of ``docker kill`` until the sandbox's state says so."""
    times = []
    for _ in range(count):
        async with await Sandbox.create(backend=backend) as box:
            noticed: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            box.watch(lambda change, seen=noticed: None if seen.done() else seen.set_result(time.perf_counter()))
            begin = time.perf_counter()
            await asyncio.to_thread(client.api.kill, box.id)
            times.append(1e3 * (await asyncio.wait_for(noticed, 60) - begin))
            assert box.state == "unhealthy"
    return [Figure("crash detected, p95", p(times, 95), "ms", 100)]


async def recovery(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """From the call of ``docker kill`` until the next command has run, in a sandbox of the warm pool."""
    times = []
    async with SandboxPool(None, backend, min_idle=2, max_size=4) as pool:
        await pool.filled()
        async with Supervisor(pool, recovery="restart", intensity=count + 1).run() as box:
            for done in range(1, count + 1):
                await box.exec(TRUE)
                await pool.filled()
                begin = time.perf_counter()
                await asyncio.to_thread(client.api.kill, box.status.id)
                while not (box.recoveries == done and await _works(box)):
                    await asyncio.sleep(0.001)
                times.append(time.perf_counter() - begin)
    return [Figure("recovery from the warm pool, p95", p(times, 95), "s", 1)]


async def _works(box: Any) -> bool:
    with contextlib.suppress(SandboxLost):
        return (await box.exec(TRUE)).ok
    return False


def orphans(client: DockerClient, count: int) -> list[Figure]:
    """Seconds until nothing is left of an owner that was killed by SIGKILL."""
    label = secrets.token_hex(8)
    wanted = {"all": True, "filters": {"label": f"agentkit.user.benchmark={label}"}}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, label, str(count)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        assert owner.stdout.readline() == "ready\n", "the owner did not come to make its sandboxes"
        assert len(client.api.containers(**wanted)) == count
    finally:
        owner.kill()
        begin = time.monotonic()
        owner.wait()
    left = count
    while left and time.monotonic() - begin < 300:
        time.sleep(0.05)
        left = len(client.api.containers(**wanted))
    assert not left, f"{left} sandboxes are left after five minutes"
    return [Figure(f"nothing left of a killed owner's {count} sandboxes after", time.monotonic() - begin, "s", 30)]


async def density(backend: Backend, count: int) -> list[Figure]:
    """How much less memory this machine has with ``count`` idle sandboxes, all of which answer."""
    before = _available()
    async with _many(backend, count) as boxes:
        await asyncio.sleep(1)
        used = before - _available()
        for box in boxes:
            await box.exec(TRUE, check=True)
    return [
        Figure(f"memory of an idle sandbox, all included ({count} made)", used / count / 2**20, "MiB"),
        Figure("idle sandboxes in 2 GiB", 2 * 2**30 / (used / count), "", 150, "at least"),
    ]


@contextlib.asynccontextmanager
async def _many(backend: Backend, count: int) -> AsyncIterator[list[Sandbox]]:
    boxes: list[Sandbox] = []
    line = iter(range(count))

    async def maker() -> None:
        for _ in line:
            boxes.append(await Sandbox.create(backend=backend))

    try:
        await asyncio.gather(*(maker() for _ in range(4)))
        yield boxes
    finally:
        await asyncio.gather(*(box.close() for box in boxes))


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
