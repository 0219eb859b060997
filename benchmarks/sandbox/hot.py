"""What is asked of sandboxes that are there: commands, many at once, steps of an environment; what an agent weighs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import agentkit
from agentkit.sandboxes import Sandbox, SyncSandbox
from benchmarks.sandbox.figures import Figure, p
from docker import DockerClient

TRUE = ["true"]
AT_ONCE = 16


async def timed(work: Awaitable[Any]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begin)


def timed_call(work: Callable[..., Any], *arguments: Any) -> float:
    begin = time.perf_counter()
    work(*arguments)
    return 1e3 * (time.perf_counter() - begin)


async def exec_latency(box: Sandbox, client: DockerClient, rounds: int) -> list[Figure]:
    """The same command in the same container by the agent and by the engine's exec, in turn."""
    container = client.containers.get(box.id)
    ours, engine = [], []
    for _ in range(rounds):
        ours += [await timed(box.exec(TRUE)) for _ in range(50)]
        engine += [await asyncio.to_thread(timed_call, container.exec_run, TRUE) for _ in range(5)]
    return [
        Figure("exec of `true`, p50", p(ours, 50), "ms", 2),
        Figure("exec of `true`, p95", p(ours, 95), "ms"),
        Figure("docker SDK `exec_run` of `true`, p50", p(engine, 50), "ms"),
        Figure("exec_run / exec, p50", p(engine, 50) / p(ours, 50), "times", 20, "at least"),
    ]


def sync_latency(calls: int) -> list[Figure]:
    with SyncSandbox.create() as box:
        times = [timed_call(box.exec, TRUE) for _ in range(calls)]
    return [Figure("exec of `true` by `SyncSandbox`, p50", p(times, 50), "ms", 2)]


async def exec_rate(boxes: Sequence[Sandbox], client: DockerClient, calls: int) -> list[Figure]:
    """Calls a second with 16 under way: all in one sandbox, one in each of 16, and by the engine's exec."""

    async def rate(where: Sequence[Sandbox]) -> float:
        line = iter(range(calls))

        async def caller(box: Sandbox) -> None:
            for _ in line:
                await box.exec(TRUE)

        return 1e3 * calls / await timed(asyncio.gather(*map(caller, where)))

    def engine(count: int) -> float:
        container = client.containers.get(boxes[0].id)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return 1e3 * count / timed_call(list, pool.map(container.exec_run, [TRUE] * count))

    await rate(boxes)
    return [
        Figure(
            "exec/s, 16 at once, in one sandbox of one CPU", await rate(boxes[:1] * AT_ONCE), "/s", 1200, "at least"
        ),
        Figure("exec/s, 16 at once, one in each of 16 sandboxes", await rate(boxes), "/s", 1200, "at least"),
        Figure("docker SDK `exec_run`/s, 16 at once", await asyncio.to_thread(engine, max(16, calls // 20)), "/s"),
    ]


def agent_memory(boxes: Sequence[Sandbox], client: DockerClient) -> list[Figure]:
    """Of the agents that have just worked; needs root to look."""
    rows = []
    for box in boxes:
        main = client.containers.get(box.id).attrs["State"]["Pid"]
        agent = Path(f"/proc/{main}/task/{main}/children").read_text().split()[0]  # the only child of its init
        lines = Path(f"/proc/{agent}/smaps_rollup").read_text().splitlines()[1:]
        rows.append({line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines})
    share, resident = (statistics.median(row[name] for row in rows) for name in ("Pss", "Rss"))
    private = statistics.median(row["Private_Dirty"] + row["Private_Clean"] for row in rows)
    return [
        Figure(f"agent's memory, its share (PSS) among {len(boxes)}", share, "MiB", 8, "at most"),
        Figure("agent's memory that is its own", private, "MiB"),
        Figure("agent's memory that is resident (RSS)", resident, "MiB"),
    ]


def env_step(steps: int) -> list[Figure]:
    """FrozenLake behind a container and here, in turn; the same seeds and actions."""
    here, there = agentkit.make("FrozenLake-v1"), agentkit.make("FrozenLake-v1", sandbox="docker")
    times: dict[Any, list[float]] = {here: [], there: []}
    try:
        for episode in range(steps // 10):
            for env, taken in times.items():
                env.reset(seed=episode)
                for move in range(10):
                    begin = time.perf_counter()
                    _, _, terminated, truncated, _ = env.step(("Left", "Up")[move % 2])
                    taken.append(1e3 * (time.perf_counter() - begin))
                    if terminated or truncated:
                        break
    finally:
        there.close()
        here.close()
    return [
        Figure("an environment's step in a container adds, p50", p(times[there], 50) - p(times[here], 50), "ms", 1.5),
        Figure("the same step in this process, p50", p(times[here], 50), "ms"),
    ]
