"""Measure many sandboxes: on two real servers on this machine, and on simulated hosts in virtual time.

    python -m benchmarks.scale                     # 200 Docker sandboxes, then one server is killed
    python -m benchmarks.scale --users 40          # fewer
    python -m benchmarks.scale --simulate          # 100 hosts and 10,000 sandboxes in virtual time; takes long

Exits with 1 if a sandbox was lost before the kill or is left at the end, or an episode had a wrong result.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from benchmarks.sandbox.figures import p
from benchmarks.scale.servers import Measured, measure, servers
from benchmarks.scale.simulation import Scenario, simulate

LARGE = Scenario(
    hosts=100,
    sandboxes=10_000,
    spares=1000,
    seconds=120.0,
    actions=4,
    think=20.0,
    host_faults=0.3,
    sandbox_faults=5.0,
    ping_interval=20.0,
)


def show(measured: Measured) -> None:
    """Print what was measured, in milliseconds, MiB and seconds."""
    for name, seconds in measured.seconds.items():
        if seconds:
            shown = ", ".join(f"p{percent} {1e3 * p(seconds, percent):,.0f}" for percent in (50, 95, 99))
            print(f"{name} ({len(seconds)}): {shown} ms")
    for name, use in measured.use.items():
        print(f"{name}: {use.memory >> 20} MiB, {use.descriptors} descriptors, {use.processor:.0%} of a processor")
    print(f"sandboxes per host: {dict(measured.per_host)}")
    print(f"{measured.lost} lost before the kill, {measured.wrong} wrong results, {measured.left} left at the end")
    if measured.recovered:
        print(
            f"{measured.killed_with} in use on the killed server: "
            f"first {min(measured.recovered):.1f} s, p50 {p(measured.recovered, 50):.1f} s, "
            f"all {max(measured.recovered):.1f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--backend", default="docker")
    asked = parser.parse_args()
    if asked.simulate:
        print(simulate(LARGE, asked.seed))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="scale-", ignore_cleanup_errors=True) as directory,
        servers(2, asked.backend, 2 * asked.users + 10, Path(directory)) as running,
    ):
        measured = asyncio.run(measure(running, asked.backend, asked.users, asked.seconds))
    show(measured)
    return int(bool(measured.lost or measured.wrong or measured.left))


if __name__ == "__main__":
    sys.exit(main())
