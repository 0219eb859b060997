"""agentkit's figures, each compared with the plain engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import psutil
from docker import DockerClient

import agentkit
from agentkit.errors import SandboxLost
from agentkit.sandboxes import Sandbox, SandboxPool, SandboxSpec, Supervisor, SyncSandbox
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends.docker.engine import DockerEngine
from agentkit.sandboxes.backends.docker.options import container
from agentkit.sandboxes.backends.docker.runtime import RuntimeVolume
from benchmarks.sandbox.figures import Figure, p, timed

TRUE = ["true"]
AT_ONCE = 16


OWNER = """
import sys
from agentkit.sandboxes import SyncSandbox
boxes = [SyncSandbox.create(labels={"benchmark": sys.argv[1]}) for _ in range(int(sys.argv[2]))]
print(flush=True)
boxes[0].exec("sleep 3600", timeout=3600)
"""


def repeated(call: Callable[[], Any], times: int) -> list[float]:
    return [1e3 * seconds for seconds in timeit.repeat(call, number=1, repeat=times)]


async def exec_latency(box: Sandbox, client: DockerClient, rounds: int) -> list[Figure]:
    """Run the same command in the same container by the agent and by the engine's exec, in turn."""
    container = client.containers.get(box.id)
    ours, engine = [], []
    for _ in range(rounds):
        ours += [await timed(box.exec(TRUE)) for _ in range(50)]
        engine += await asyncio.to_thread(repeated, lambda: container.exec_run(TRUE), 5)
    return [
        Figure("exec of `true`, p50", p(ours, 50), "ms", 2),
        Figure("exec of `true`, p95", p(ours, 95), "ms"),
        Figure("docker SDK `exec_run` of `true`, p50", p(engine, 50), "ms"),
        Figure("`exec_run` / exec, p50", p(engine, 50) / p(ours, 50), "times", 20, "≥"),
    ]


def sync_latency(calls: int) -> list[Figure]:
    with SyncSandbox.create() as box:
        times = repeated(lambda: box.exec(TRUE), calls)
    return [Figure("exec of `true` by `SyncSandbox`, p50", p(times, 50), "ms", 2)]


async def exec_rate(boxes: list[Sandbox], client: DockerClient, seconds: float) -> list[Figure]:
    """Measure calls per second, 16 in flight: all in one sandbox, one in each of 16, and by the engine's exec."""
    clock = time.perf_counter

    async def rate(where: Sequence[Sandbox]) -> float:
        begin, calls = clock(), 0

        async def caller(box: Sandbox) -> None:
            nonlocal calls
            while clock() < begin + seconds:
                await box.exec(TRUE)
                calls += 1

        await asyncio.gather(*map(caller, where))
        return calls / (clock() - begin)

    def engine(count: int) -> float:
        container = client.containers.get(boxes[0].id)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return count / timeit.timeit(lambda: list(pool.map(container.exec_run, [TRUE] * count)), number=1)

    await rate(boxes)
    one, each = await rate(boxes[:1] * AT_ONCE), await rate(boxes)
    return [
        Figure("exec/s, 16 at once in one sandbox of one CPU", one, "/s", 1200, "≥"),
        Figure("exec/s, 16 at once, one in each of 16 sandboxes", each, "/s", 1200, "≥"),
        Figure(
            "docker SDK `exec_run`/s, 16 at once", await asyncio.to_thread(engine, 16 if seconds < 1 else 160), "/s"
        ),
    ]


def mains(boxes: Sequence[Sandbox], client: DockerClient) -> list[psutil.Process]:
    """Return the containers' main processes, which are the agents; their parents are the engine's shims."""
    return [psutil.Process(client.api.inspect_container(box.id)["State"]["Pid"]) for box in boxes]


def agent_memory(boxes: Sequence[Sandbox], client: DockerClient) -> list[Figure]:
    """Measure the memory of agents that have run commands. Needs root."""
    agents = [main.memory_full_info() for main in mains(boxes, client)]
    share, own, resident = (
        statistics.median(getattr(agent, name) for agent in agents) / 2**20 for name in ("pss", "uss", "rss")
    )
    return [
        Figure(f"an agent's memory: its share (PSS) among {len(boxes)}", share, "MiB", 8, "≤"),
        Figure("an agent's memory: not shared (USS)", own, "MiB"),
        Figure("an agent's memory: resident (RSS)", resident, "MiB"),
    ]


def env_step(episodes: int) -> list[Figure]:
    """Play the same episodes of FrozenLake in a container and in this process."""
    medians = []
    for sandbox in ("docker", None):
        env: Any = agentkit.make("FrozenLake-v1", sandbox=sandbox)
        try:
            times = []
            for seed in range(episodes):
                env.reset(seed=seed)
                times += repeated(lambda env=env: env.step("Left"), 10)  # it bumps into the edge
        finally:
            env.close()
        medians.append(p(times, 50))
    return [
        Figure("time added to an environment step by a container, p50", medians[0] - medians[1], "ms", 1.5),
        Figure("the same step in this process, p50", medians[1], "ms"),
    ]


async def create(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """Measure the time until sandboxes are ready, and until the same containers without an agent are started."""

    def bare(directory: str) -> float:
        body = container(SandboxSpec(), SandboxSpec().image, directory, {}, RuntimeVolume(DockerEngine()).name)
        body["Entrypoint"] = ["sleep", "3600"]
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


async def acquire(backend: Backend, warm: Literal["running", "paused"], count: int) -> list[Figure]:
    times = []
    reused: dict[str, Any] = {"max_uses": None, "reset": lambda box: asyncio.sleep(0)}
    async with SandboxPool(None, backend, min_idle=4, max_size=4, warm=warm, **reused) as pool:
        for _ in range(count):
            await pool.wait_filled()
            begin = time.perf_counter()
            lease = await pool.acquire()
            times.append(1e3 * (time.perf_counter() - begin))
            lease.release()
    return [
        Figure(f"warm acquire ({warm}), p50", p(times, 50), "ms"),
        Figure(f"warm acquire ({warm}), p95", p(times, 95), "ms", {"running": 5, "paused": 15}[warm]),
    ]


async def crash(boxes: Sequence[Sandbox], client: DockerClient) -> list[Figure]:
    """Measure the time from the call of ``docker kill`` until the sandbox's state shows it."""
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
    """Measure the time from ``docker kill`` until the next command has run in a sandbox of the warm pool."""
    times = []
    async with SandboxPool(None, backend, min_idle=2, max_size=4) as pool:
        supervisor = Supervisor(pool, recovery="replay")
        for _ in range(count):
            async with supervisor.run() as box:
                await box.exec(TRUE)
                await pool.wait_filled()
                begin = time.perf_counter()
                await asyncio.to_thread(client.api.kill, box.status.id)
                works = False
                while not (works and box.recoveries):
                    with contextlib.suppress(SandboxLost):
                        works = (await box.exec(TRUE)).ok
                times.append(time.perf_counter() - begin)
    return [Figure("recovery from the warm pool, p95", p(times, 95), "s", 1)]


def orphans(client: DockerClient, count: int) -> list[Figure]:
    """Measure the time until all sandboxes of a killed owner are removed."""
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
    return [
        Figure(f"time until all {count} sandboxes of a killed owner are removed", time.monotonic() - begin, "s", 30)
    ]


async def density(backend: Backend, client: DockerClient, count: int) -> list[Figure]:
    """Measure the memory of ``count`` idle sandboxes that respond: control groups, and the engine's shims."""
    few = asyncio.Semaphore(8)

    async def make() -> Sandbox:
        async with few:
            return await Sandbox.create(backend=backend)

    before = psutil.virtual_memory().available
    boxes = await asyncio.gather(*(make() for _ in range(count)))
    try:
        await asyncio.sleep(1)
        less = before - psutil.virtual_memory().available
        shims = [main.parent() for main in mains(boxes, client)]
        used = sum(shim.memory_full_info().pss for shim in shims if shim is not None)
        for box in boxes:
            used += (await box.stats()).memory or 0
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
    return [
        Figure(f"an idle sandbox's memory, of {count}: control group and shim", used / count / 2**20, "MiB"),
        Figure("idle sandboxes in 2 GiB", 2 * 2**30 * count / used, "", 150, "≥"),
        Figure("decrease of the machine's free memory per sandbox", less / count / 2**20, "MiB"),
    ]
