"""Measure many sandboxes: on two real servers on this machine, and on simulated hosts in virtual time.

    python -m benchmarks.scale                      # both parts; writes docs/results/scale.md
    python -m benchmarks.scale --only servers       # 200 Docker sandboxes; replaces its part of the page
    python -m benchmarks.scale --only simulation    # 100 hosts and 10,000 sandboxes in virtual time, in one process
    python -m benchmarks.scale --only servers --users 40    # fewer; writes nothing

Exits with 1 if a sandbox was lost before a server was killed or is left at the end, or a command found a wrong state.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scale.page import page, servers, simulation
from benchmarks.scale.servers import Measured, measure, running_servers
from benchmarks.scale.simulation import Scenario, simulate

RESULTS, PAGE_PATH = Path("benchmarks/results/scale.json"), Path("docs/results/scale.md")
PARTS = ("servers", "simulation")
USERS = 200
LARGE = Scenario(
    hosts=100,
    sandboxes=10_000,
    spares=200,
    seconds=25.0,
    actions=2,
    think=20.0,
    host_faults=0.5,
    sandbox_faults=5.0,
    ping_interval=30.0,
)


def measure_servers(users: int, seconds: float, backend: str) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as directory,
        running_servers(2, backend, 2 * users + 10, Path(directory)) as running,
    ):
        return asyncio.run(measure(running, backend, users, seconds))


def run_simulation(seed: int) -> dict[str, Any]:
    """Return the scenario and the report as plain data."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)  # with millions of objects, frequent collections take most of the time
    report = simulate(LARGE, seed, lambda state: print(state, file=sys.stderr, flush=True))
    return {**asdict(LARGE), **vars(report), "faults": dict(report.faults)}


def save(found: Mapping[str, Any]) -> None:
    """Replace the measured parts of the results, and write the page."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known |= found
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE_PATH.write_text(page(known))
    print(f"written to {PAGE_PATH}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0, help="seed of the simulation")
    parser.add_argument("--users", type=int, default=USERS, help="real sandboxes in use at one time")
    parser.add_argument("--seconds", type=float, default=120.0, help="time under load")
    parser.add_argument("--backend", default="docker", help="back end of the real servers")
    asked = parser.parse_args()
    found, failed = dict[str, Any](), False
    if asked.only != "simulation":
        measured = measure_servers(asked.users, asked.seconds, asked.backend)
        failed = bool(measured.lost or measured.wrong or measured.left)
        found["servers"] = {**asdict(measured), "processors": os.cpu_count()}
        print(servers(found["servers"]))
    if asked.only != "servers":
        found["simulation"] = run_simulation(asked.seed)
        print(simulation(found["simulation"]))
    if (asked.users, asked.backend) == (USERS, "docker"):
        save(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
