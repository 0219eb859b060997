"""Measure how long episodes take to continue after their container or host failed, in Docker.

    python -m benchmarks.recovery            # about half an hour; writes docs/results/recovery.md
    python -m benchmarks.recovery --only Sokoban-v0    # replaces the rows of one environment
    python -m benchmarks.recovery --quick    # few repetitions; writes nothing

Needs root (to kill containers without the delay of the engine), Docker, and the extras ``alfworld`` and ``swe``. Builds
the image `agentkit/env:benchmark`, and one task of SWEBench-v0 if there is none. The machine should be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentkit.envs.isolation.image import build_env_image
from agentkit.errors import AgentkitError
from benchmarks.environments.__main__ import IMAGE, experts
from benchmarks.recovery import cases
from benchmarks.recovery.figures import NO_GOAL, Row, page, table

RESULTS, PAGE_PATH = Path("benchmarks/results/recovery.json"), Path("docs/results/recovery.md")
REPLAYED = ["FrozenLake-v1", "Sokoban-v0", "WebShop-v0", "AlfWorld-v0"]
OWN = "SWEBench-v0"
FAULTS = list(dict.fromkeys(case.fault for case in cases.CASES))
TASK = "wcwidth__wcwidth-0.2.13"
TASKS = 5
"""Number of tasks of each environment, played in turn."""


async def replayed_rows(id: str, faults: Sequence[str], repeats: int, concurrency: int) -> list[Row]:
    """Measure faults of one environment that is replayed."""
    scripts, _ = await experts(id, TASKS)
    env = {"id": id, "sandbox_spec": {"image": IMAGE}}
    found = []

    def add(row: Row) -> None:
        found.append(row)
        print(table([row]).splitlines()[2], file=sys.stderr, flush=True)

    for case in (*cases.KILLED, *cases.FROZEN, *cases.SLOW):
        if case.fault in faults:
            number = repeats if case in cases.KILLED else (repeats + 1) // 2
            add(await cases.container_row(env, case, scripts, number, concurrency))
    for how, case in cases.LOST:
        if case.fault in faults:
            with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
                rounds = max(1, repeats // 4)
                add(await cases.host_row(env, how, case, scripts, rounds, concurrency, Path(directory)))
    return found


async def own_rows(repeats: int) -> list[Row]:
    """Measure the faults of SWEBench-v0, whose episodes start again."""
    from agentkit.envs.swebench.releases import build_task, locations
    from agentkit.envs.swebench.releases.release_list import SHIPPED

    if not (locations.folder() / "tasks" / TASK).is_dir():
        await build_task.build(next(pair for pair in SHIPPED if pair.id == TASK))
    env: dict[str, Any] = {"id": OWN, "kwargs": {"instance_ids": [TASK]}, "reset_timeout": 300.0}
    return [await cases.own_sandbox_row(env, case, repeats) for case in cases.OWN]


def measured(ids: Sequence[str], faults: Sequence[str], repeats: int, concurrency: int) -> Iterator[Row]:
    """Yield the rows of all environments; one that cannot be measured has a row with the reason."""
    for id in ids:
        try:
            work = own_rows(repeats) if id == OWN else replayed_rows(id, faults, repeats, concurrency)
            yield from asyncio.run(work)
        except AgentkitError as error:
            yield Row(id, "all faults", "", NO_GOAL, (), 0, f"{type(error).__name__}: {error}")
        left_out = [fault for fault in FAULTS if fault not in faults and id != OWN]
        yield from (Row(id, fault, "any redundancy", NO_GOAL, (), 0, "Left out of this run.") for fault in left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="killed containers per row; half as many other faults")
    parser.add_argument("--concurrency", type=int, default=4, help="episodes at the same time")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*REPLAYED, OWN], default=[*REPLAYED, OWN], metavar="ENV")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="FAULT")
    asked = parser.parse_args()
    repeats = 2 if asked.quick else asked.repeats
    begin = os.getloadavg()[0]
    if asked.only != [OWN]:
        build_env_image(packages=["alfworld"], tag=IMAGE)
    found = list(measured(asked.only, asked.faults, repeats, asked.concurrency))
    machine = (
        f"{os.cpu_count()} CPUs with a load of {begin:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{machine}\n\n{table(found)}")
    missed = [f"{row.env}, {row.fault}, {row.redundancy}" for row in found if row.met not in ("", "yes")]
    print(f"goals missed: {'; '.join(missed) or 'none'}")
    if not asked.quick:
        save(found, machine, asked.concurrency)


def save(found: Sequence[Row], machine: str, concurrency: int) -> None:
    """Replace the results of the measured environments, and write the page of all results."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for id in dict.fromkeys(row.env for row in found):
        rows = [asdict(row) for row in found if row.env == id]
        known[id] = {"machine": machine, "concurrency": concurrency, "rows": rows}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    machines = {id: known[id]["machine"] for id in (*REPLAYED, OWN) if id in known}
    rows = [Row.of(row) for id in machines for row in known[id]["rows"]]
    missing = [id for id in (*REPLAYED, OWN) if id not in known]
    rows += [Row(id, "all faults", "any redundancy", NO_GOAL, (), 0, "Not run yet.") for id in missing]
    PAGE_PATH.write_text(page(rows, machines, concurrency))
    print(f"written to {PAGE_PATH}")


if __name__ == "__main__":
    main()
