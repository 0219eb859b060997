"""Train while containers are killed, frozen and slowed at random, and compare the step time with the fault-free one.

    python -m benchmarks.faults             # about an hour; writes docs/results/faults.md
    python -m benchmarks.faults --short     # one run of less than a minute; checks that it survives

Both need Docker and the image ``agentkit/env`` (``agentkit sandbox build``). Each run is `agentkit run` in a process of
its own. The fault rate changes between its training steps, so that rates are compared within one run. The seed fixes
the kinds and times of the faults, but not what the run does then. The short form exits with 1 if an episode was
lost, a container is left, or hardly any fault was injected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.faults.figures import GOAL_RATE, Row, page, problems, recoveries, rows, table
from benchmarks.faults.runs import Observed, observe

RESULTS, PAGE_PATH = Path("benchmarks/results/faults.json"), Path("docs/results/faults.md")
MODEL = Path("benchmarks/results/faults-model")
"""A run that imitated the expert, so that the model's answers are moves. Made once."""
RATES = (0.0, 0.02, 0.2)
"""Shares of the containers that are attacked per minute."""
ENV: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "kwargs": {"split": "train"},
    "max_turns": 12,
    "actions_per_turn": 1,
}
ENGINE = {"max_batch": 128, "max_context": 640, "threads": 1}
CONFIG: dict[str, Any] = {
    "name": "faults",
    "steps": 1_000_000,
    "env": {**ENV, "sandbox": "docker", "sandbox_share": 1},
    "engine": ENGINE,
    "learner": {"lr": 1e-9, "max_tokens": 4096, "threads": 1},
    "rollout": {"max_tokens": 8, "groups": 12, "group_size": 6},
    "checkpoint": {"every": 0},
    "evaluation": {"episodes": 1},
}
"""One environment in each container. The learning rate is so small that all steps do the same work."""
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "one spare": {},
    "and hedged calls": {"env": {"hedge": "p95"}},
    "and rollout redundancy": {"rollout": {"extra_groups": 1, "extra_members": 1}},
}
"""Settings of each arm, by section. The first arm has the default settings."""
SHORT = {"groups": 2, "group_size": 4, "extra_members": 1}
SHORT_SCHEDULE = ((3.0, 15.0),)
"""At three faults per container and minute, ten containers get about eight faults in fifteen seconds."""


def made_model() -> Path:
    """Return a model that imitates FrozenLake's expert; train it if it does not exist."""
    model = MODEL / "model"
    if not model.is_dir():
        config = {
            "dir": str(MODEL),
            "steps": 0,
            "env": ENV,
            "engine": ENGINE,
            "imitation": {"episodes": 480, "noise": 0.35, "batch_episodes": 16, "lr": 4e-3},
            "learner": {"optimizer": "muon", "max_tokens": 4096},
            "evaluation": {"episodes": 64},
        }
        command = [sys.executable, "-m", "agentkit", "run", "/dev/stdin"]
        subprocess.run(command, input=json.dumps(config), text=True, check=True, timeout=900)
    return model


async def measure(seconds: Mapping[float, float], cycles: int, seed: int) -> list[Row]:
    """Alternate the arms, and within each run the rates; return one row for each arm and rate.

    Args:
        seconds: duration of the two phases of each rate in one run.
        cycles: number of runs of each arm.
        seed: of the nemesis.

    Raises:
        RunFailed: a run ended too early, or made no progress.
    """
    config = {**CONFIG, "model": {"path": str(made_model().absolute())}}
    schedule = [(rate, seconds[rate]) for rate in (*RATES, *RATES[::-1])]
    found: dict[str, list[Observed]] = {arm: [] for arm in ARMS}
    for cycle in range(cycles):
        for arm, changes in ARMS.items():
            print(f"run {cycle + 1} of {cycles}, {arm}", file=sys.stderr, flush=True)
            settings = {**config, **{name: {**config[name], **values} for name, values in changes.items()}}
            with tempfile.TemporaryDirectory(prefix="faults-") as directory:
                found[arm].append(await observe(settings, Path(directory), schedule, seed + cycle))
            print(table(rows(arm, found[arm])), file=sys.stderr, flush=True)
    return [row for arm in ARMS for row in rows(arm, found[arm])]


def short(seed: int) -> int:
    """Check that one short run survives; return the exit code."""
    config = {**CONFIG, "rollout": {**CONFIG["rollout"], **SHORT}, "env": {**CONFIG["env"], "parser": "plain"}}
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        found = asyncio.run(observe(config, Path(directory), SHORT_SCHEDULE, seed))
    print(table(rows("short", [found])))
    wrong = problems([found], faults=3)
    print("\n".join(wrong) or "the run survived, no episode was lost, no container is left")
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--cycles", type=int, default=2, help="runs of each arm")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase; three times that at 2 %% faults")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.short:
        return short(asked.seed)
    begin = os.getloadavg()[0]
    seconds = {rate: asked.seconds * (3 if rate == GOAL_RATE else 1) for rate in RATES}
    found = asyncio.run(measure(seconds, asked.cycles, asked.seed))
    machine = (
        f"{os.cpu_count()} CPUs with a load of {begin:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end, "
        f"Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{machine}\n\n{table(found)}\n{recoveries(found)}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows_ = [asdict(row) for row in found]
    RESULTS.write_text(json.dumps({"machine": machine, **vars(asked), "rows": rows_}, indent=1) + "\n")
    PAGE_PATH.write_text(page(found, machine, CONFIG["rollout"], ARMS["and rollout redundancy"]["rollout"]))
    print(f"written to {RESULTS} and {PAGE_PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
