"""``python -m benchmarks.rollout``: rollout throughput, compared with two common schedulers and a computed bound.

Prints tables with ratios and writes them as JSON. Three clocks: ``virtual`` (waits are skipped and computing takes
no time: exact and repeatable), ``cpu`` (waits are skipped, computing takes its CPU time, as on a dedicated core) and
``real`` (needs an idle machine). Each takes a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rollout import overhead
from benchmarks.rollout.bound import list_schedule
from benchmarks.rollout.schedulers import Plan, lock_step, ours, trajectory_level
from benchmarks.rollout.virtual import run_charged, run_virtual
from benchmarks.rollout.workload import Fault, Latency, Workload

Run = Callable[[Coroutine[Any, Any, float]], float]
Row = dict[str, Any]

LATENCIES: tuple[Latency, ...] = ("gaussian", "heavy")
REDUNDANT = {"extra_groups": 4, "extra_members": 1}
TRAIN_S = 0.5
"""A training step beside rollouts, about half a wave of the Gaussian setting."""


def scheduling(run: Run) -> list[Row]:
    """Run three synchronous waves of 256 episodes of 10 turns; training takes no time."""
    rows = []
    for latency in LATENCIES:
        plan = Plan(Workload(latency))
        bound, mine = list_schedule(plan), run(ours(plan))
        lock, level = run(lock_step(plan)), run(trajectory_level(plan))
        rows.append(
            {
                "latency": latency,
                "bound s": bound,
                "ours s": mine,
                "trajectory s": level,
                "lock-step s": lock,
                "ours / bound": mine / bound,
                "lock-step / ours": lock / mine,
                "lock-step / bound": lock / bound,
            }
        )
    return rows


def asynchrony(run: Run, waves: int, redundancy: Sequence[dict[str, int]]) -> list[Row]:
    """Run the same with training steps of ``TRAIN_S`` seconds, for several async ratios."""
    rows = []
    for latency in LATENCIES:
        base = Plan(Workload(latency), train_s=TRAIN_S, waves=waves)
        sync = run(ours(base))
        for extra in redundancy:
            for ratio in (0.0, 0.5, 1.0, 2.0):
                plan = replace(base, async_ratio=ratio, **extra)
                bound, mine = list_schedule(plan), run(ours(plan))
                rows.append(
                    {
                        "latency": latency,
                        "waves": waves,
                        "async ratio": ratio,
                        "episodes": "36 x 9" if extra else "32 x 8",
                        "bound s": bound,
                        "ours s": mine,
                        "ours / bound": mine / bound,
                        "sync / ours": sync / mine,
                    }
                )
    return rows


def faults(run: Run, waves: int, step_timeout: float) -> list[Row]:
    """Run with 2 % of the episodes hanging, or 20 times slower; with redundancy and without."""
    rows = []
    faults_: tuple[Fault, ...] = ("none", "slow", "hung")
    for latency in LATENCIES:
        clean = 0.0
        for fault in faults_:
            plan = Plan(Workload(latency, fault), waves=waves, step_timeout=step_timeout)
            without = run(ours(plan)) / plan.waves
            redundant = run(ours(replace(plan, **REDUNDANT))) / plan.waves
            clean = clean or without
            rows.append(
                {
                    "latency": latency,
                    "fault (2 %)": fault,
                    "step without s": without,
                    "step with s": redundant,
                    "without / fault-free": without / clean,
                    "with / fault-free": redundant / clean,
                }
            )
    return rows


def cost() -> list[Row]:
    """Measure the cost of the loop, including the tokenizer."""
    found = overhead.measure()
    targets = {
        "turns_per_s_1000": ">= 6000",
        "cost_growth_100_to_5000": "<= 1.25",
        "idle_bytes": "<= 65536",
    }
    return [{"figure": name, "value": value, "target": targets.get(name, "")} for name, value in found.items()]


def table(title: str, rows: Sequence[Row]) -> str:
    """Return a Markdown table."""

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"

    body = [[cell(value) for value in row.values()] for row in rows]
    heads = list(rows[0])
    widths = [max(len(head), *(len(row[i]) for row in body)) for i, head in enumerate(heads)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in [heads, ["-" * width for width in widths], *body]
    ]
    return f"\n### {title}\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout", description=__doc__)
    parser.add_argument("--clock", action="append", choices=("virtual", "cpu", "real"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rollout.json"))
    arguments = parser.parse_args()
    clocks: dict[str, Run] = {"virtual": run_virtual, "cpu": run_charged, "real": asyncio.run}
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load average": os.getloadavg()[0],
    }
    print(f"Python {report['python']}, {report['cpus']} CPUs, load average {report['load average']:.1f}")

    def show(title: str, rows: list[Row]) -> None:
        report[title] = rows
        print(table(title, rows), flush=True)

    for name, run in clocks.items():
        if name not in (arguments.clock or ("virtual", "cpu")):
            continue
        show(f"Schedulers, {name} clock", scheduling(run))
        show(f"Async ratio and redundancy, {name} clock", asynchrony(run, 3, ({}, REDUNDANT)))
        if name == "virtual":
            show("Async ratio in the longer run, virtual clock", asynchrony(run, 10, ({},)))
        # In real time, what hangs had better not hang for long.
        waves, step_timeout = (1, 5.0) if name == "real" else (3, 30.0)
        show(f"Faults, {name} clock", faults(run, waves, step_timeout))
    show("The loop's own cost", cost())
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
