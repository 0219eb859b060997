"""What is asked of sandboxes that are there: commands, many at once, steps of an environment; what an agent weighs."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docker import DockerClient

import agentkit
from agentkit.sandboxes import Sandbox, SyncSandbox
from benchmarks.sandbox.figures import Figure, p, timed, timed_call

TRUE = ["true"]
AT_ONCE = 16


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
        Figure("`exec_run` / exec, p50", p(engine, 50) / p(ours, 50), "times", 20, "≥"),
    ]


def sync_latency(calls: int) -> list[Figure]:
    with SyncSandbox.create() as box:
        times = [timed_call(box.exec, TRUE) for _ in range(calls)]
    return [Figure("exec of `true` by `SyncSandbox`, p50", p(times, 50), "ms", 2)]


async def exec_rate(boxes: list[Sandbox], client: DockerClient, calls: int) -> list[Figure]:
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
    one, each = await rate(boxes[:1] * AT_ONCE), await rate(boxes)
    return [
        Figure("exec/s, 16 at once in one sandbox of one CPU", one, "/s", 1200, "≥"),
        Figure("exec/s, 16 at once, one in each of 16 sandboxes", each, "/s", 1200, "≥"),
        Figure("docker SDK `exec_run`/s, 16 at once", await asyncio.to_thread(engine, max(16, calls // 40)), "/s"),
    ]


def agent_memory(boxes: Sequence[Sandbox], client: DockerClient) -> list[Figure]:
    """Of agents that have worked; only root can look."""
    rows = []
    for box in boxes:
        main = client.api.inspect_container(box.id)["State"]["Pid"]
        agent = Path(f"/proc/{main}/task/{main}/children").read_text().split()[0]  # the only child of the init
        lines = Path(f"/proc/{agent}/smaps_rollup").read_text().splitlines()[1:]
        rows.append({line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines})
    share, resident, own = (statistics.median(row[name] for row in rows) for name in ("Pss", "Rss", "Private_Dirty"))
    return [
        Figure(f"an agent's memory: its share (PSS) among {len(boxes)}", share, "MiB", 8, "≤"),
        Figure("an agent's memory: its own alone", own, "MiB"),
        Figure("an agent's memory: resident (RSS)", resident, "MiB"),
    ]


def env_step(episodes: int) -> list[Figure]:
    """The same episodes of FrozenLake in a container and in this process."""
    medians = []
    for options in ({"sandbox": "docker"}, {}):
        env: Any = agentkit.make("FrozenLake-v1", **options)
        try:
            times = []
            for seed in range(episodes):
                env.reset(seed=seed)
                times += [timed_call(env.step, move) for move in ("Left", "Up") * 5]  # nobody falls into a hole there
        finally:
            env.close()
        medians.append(p(times, 50))
    return [
        Figure("an environment's step in a container adds, p50", medians[0] - medians[1], "ms", 1.5),
        Figure("the same step in this process, p50", medians[1], "ms"),
    ]
