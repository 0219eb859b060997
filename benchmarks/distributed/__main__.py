"""Measure what distribution costs: training, weight updates, and the controller, on a Ray cluster of this machine.

    python -m benchmarks.distributed                    # about 45 minutes; writes docs/results/distributed.md
    python -m benchmarks.distributed --only weights     # one part of the page: replaces it
    python -m benchmarks.distributed --short            # a few steps of each part; writes nothing

Needs the extras `train` and `ray`, and an idle machine. Each part runs in a process of its own. Exits with 1 if a token
has a wrong version or an update met no request in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.distributed.goals import TOLERANCE
from benchmarks.distributed.page import PARTS, page

RESULTS, PAGE_PATH = Path("benchmarks/results/distributed.json"), Path("docs/results/distributed.md")
PART_S = 600.0
"""Limit of the part that repeats as often as it can."""


def training(short: bool) -> list[Any]:
    from benchmarks.distributed.training import ARMS, SHORT_ARMS, measure

    if short:
        return measure(SHORT_ARMS, 2, 0.0, imitate=False)
    return measure(ARMS, 6, 0.85 * PART_S, imitate=True)


def learning(short: bool) -> list[Any]:
    from benchmarks.distributed.learning import measure

    return measure(range(1), steps=1) if short else measure(range(3))


def weights(short: bool) -> list[Any]:
    from benchmarks.distributed.weights import ENGINES, SIZES, measure

    return asyncio.run(measure(SIZES[:1], (1, 2), 2) if short else measure(SIZES, ENGINES, 5))


def throughput(short: bool) -> list[Any]:
    from benchmarks.distributed.controller import throughput

    return asyncio.run(throughput(80, 1, 1) if short else throughput(1000, 20_000, 7))


def growth(short: bool) -> list[Any]:
    from benchmarks.distributed.controller import growth

    return asyncio.run(growth((104,), 2.0, 1) if short else growth((104, 304, 1000, 3000, 5000), 10.0, 5))


MEASURES: dict[str, Callable[[bool], list[Any]]] = {
    "training": training,
    "learning": learning,
    "weights": weights,
    "throughput": throughput,
    "growth": growth,
}


def run(part: str, short: bool) -> dict[str, Any]:
    """Measure one part in this process; return its rows, and a sentence about the machine."""
    from agentkit.trainers.cluster.ray_cluster import local_cluster

    began, load = time.monotonic(), os.getloadavg()[0]
    with contextlib.nullcontext() if part == "learning" else local_cluster(5):  # learning starts its own
        rows = [asdict(row) for row in MEASURES[part](short)]
    minutes = (time.monotonic() - began) / 60
    machine = (
        f"Measured in {minutes:.0f} minutes on {os.cpu_count()} CPUs with a load of {load:.1f} at the beginning and "
        f"{os.getloadavg()[0]:.1f} at the end (the benchmark's own load included), Linux {platform.release()}, Python "
        f"{platform.python_version()}."
    )
    return {"machine": machine, "rows": rows}


def save(part: str, found: dict[str, Any]) -> None:
    """Replace a part of the results, and write the page."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = found
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE_PATH.write_text(page(known))
    print(f"written to {PAGE_PATH}", flush=True)


def problems(part: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return what must not happen, whatever the speed."""
    if part != "weights":
        return []
    return [
        *(f"a token has a wrong version: {row}" for row in rows if row["worst"] >= TOLERANCE),
        *(f"the weights of versions hardly differ: {row}" for row in rows if row["other"] < 10 * TOLERANCE),
        *(f"an update met no request in flight: {row}" for row in rows if not min(row["in_flight"])),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS))
    parser.add_argument("--short", action="store_true")
    asked = parser.parse_args()
    if asked.only is None:
        command = [sys.executable, "-m", "benchmarks.distributed", *(["--short"] if asked.short else [])]
        codes = [subprocess.run([*command, "--only", part], check=False).returncode for part in PARTS]
        return int(any(codes))
    found = run(asked.only, asked.short)
    print(f"{found['machine']}\n\n{PARTS[asked.only](found['rows'])}", flush=True)
    if not asked.short:
        save(asked.only, found)
    wrong = problems(asked.only, found["rows"])
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
