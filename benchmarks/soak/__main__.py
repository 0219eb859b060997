"""Run eight users of one pool of Docker sandboxes, with injected faults; then check for leaks and wrong counters.

    python -m benchmarks.soak [--seconds 600] [--users 8] [--seed 0]

Exits with 1 after any violation: an operation with an outcome that is not allowed, or too late; a wrong answer;
counters that do not add up; a container, descriptor, thread, zombie, task or file that is left. The seed fixes the
operations and the faults, but not how the machine interleaves them. Writes ``benchmarks/results/soak.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import docker
import psutil

from agentkit.sandboxes import Resources, SandboxSpec, paths
from agentkit.sandboxes.pool.breaker import Breaker
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.reaper import heartbeat
from agentkit.sandboxes.reaper import labels as label
from benchmarks.soak.nemesis import Nemesis
from benchmarks.soak.workload import BOUND, Tally, User

SPEC = SandboxSpec(
    resources=Resources(memory=96 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64, cpus=0.5), ttl=900
)

SETTLED = 30.0
"""Seconds after the end within which threads that still wait for the engine must be gone."""


def holdings() -> Counter[str]:
    """Count the resources of this process outside any event loop, except shared threads and the snapshot directory."""
    process = psutil.Process()
    children = process.children(recursive=True)
    return Counter(
        {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "children": len(children),
            "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        }
    ) + Counter(
        [f"thread {one.name}" for one in threading.enumerate() if not one.name.startswith("agentkit-io-")]
        + [
            f"file {path.relative_to(paths.runtime_root())}"
            for path in paths.runtime_root().rglob("*")
            if path.parent != paths.heartbeat_directory() and path != paths.runtime_root() / "snapshots"
        ]
    )


async def soak(seconds: float, users: int, seed: int) -> dict[str, Any]:
    """Run once on a new pool, from its start to its end."""
    loop, rng, tally = asyncio.get_running_loop(), random.Random(seed), Tally()
    end, now_doing = loop.time() + seconds, dict[int, asyncio.Task[None]]()
    pool = SandboxPool(SPEC, min_idle=2, max_size=users + 4, breaker=Breaker(time=loop.time, open=5.0), seed=seed)

    async def customer(number: int) -> None:
        user = User(pool, tally, random.Random(f"{seed}-{number}"))
        while loop.time() < end:
            task = now_doing[number] = asyncio.ensure_future(user.use())
            await asyncio.wait({task})
            if not task.cancelled() and (error := task.exception()) is not None:
                tally.check(False, f"user {number}: {type(error).__name__}: {error}")

    async with pool:
        await pool.wait_filled()
        nemesis = Nemesis(pool, now_doing, rng)
        attacking = asyncio.ensure_future(nemesis.run())
        customers = [asyncio.ensure_future(customer(number)) for number in range(users)]
        _, late = await asyncio.wait(customers, timeout=seconds + 2 * BOUND)
        tally.check(
            not late, f"{len(late)} users hang: {[str(task) for task in now_doing.values() if not task.done()]}"
        )
        for task in [attacking, *late]:
            task.cancel()
        await asyncio.wait([attacking, *late])
    stats = pool.stats()
    counters = stats.counters
    for name, number in tally.begun.items():
        tally.check(number == tally.ended[name].total(), f"{name}: {number} begun, {tally.ended[name].total()} ended")
    tally.check(counters.acquired == counters.released, f"{counters.acquired} acquired, {counters.released} released")
    retired = sum(counters.retired.values())
    tally.check(counters.created == retired, f"{counters.created} created, {retired} removed by cause")
    tally.check(stats.size == stats.removing == stats.extra == counters.left_behind == 0, f"not empty: {stats}")
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    tally.check(not tasks, f"tasks left: {[str(task)[:200] for task in tasks]}")
    tally.check(
        not seconds or tally.ended["exec"]["ok"] >= seconds // 10, f"hardly any work was done: {tally.ended['exec']}"
    )
    return {
        "operations": {name: dict(ended.most_common()) for name, ended in sorted(tally.ended.items())},
        "attacks": dict(nemesis.done),
        "pool": {
            "created": counters.created,
            "create failures": counters.create_failures,
            "acquired": counters.acquired,
        },
        "removed by cause": counters.retired,
        "recoveries": tally.recoveries,
        "exec ms p50, p99": [round(1000 * value, 1) for value in percentiles(tally.seconds)],
        "violations": tally.violations,
    }


def percentiles(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else [0.0] * 99
    return cuts[49], cuts[98]


def leaks(before: Counter[str]) -> list[str]:
    """Return resources that did not exist before, and all containers of this process."""
    new, end = holdings() - before, time.monotonic() + SETTLED
    while new and time.monotonic() < end:
        time.sleep(0.2)
        new = holdings() - before
    found = [f"{name}: {before[name]} before, {number} more after" for name, number in new.items()]
    client = docker.from_env(timeout=60)
    left = client.containers.list(all=True, filters={"label": f"{label.RUN}={heartbeat.current().run}"})
    found += [f"container {one.name} ({one.status})" for one in left]
    client.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        os.environ["AGENTKIT_RUNTIME_DIR"] = f"{directory}/agentkit"
        asyncio.run(soak(0.0, 1, 0))  # what is made once a process (a lease, a reaper) is made now
        while any(thread.name == "agentkit-reaper-launch" for thread in threading.enumerate()):
            time.sleep(0.1)
        before = holdings()
        report = asyncio.run(soak(asked.seconds, asked.users, asked.seed))
        report["violations"] += leaks(before)
    report |= {**vars(asked), "peak memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}
    for name, value in report.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for what, counts in rows:
            shown = ", ".join(f"{n} {k}" for k, n in counts.items()) if isinstance(counts, dict) else counts
            print(f"{name:<18}{what:<18}{shown}" if what else f"{name:<18}{shown}")
    results = Path(__file__).parents[1] / "results"
    results.mkdir(exist_ok=True)
    (results / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    print("violations found" if report["violations"] else "no leaks, all counters add up")
    return bool(report["violations"])


if __name__ == "__main__":
    sys.exit(main())
