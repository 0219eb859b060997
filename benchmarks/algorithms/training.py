"""The runs of the benchmark: each in a separate process, once.

Invariant: a run's directory contains ``peak``, the most bytes of memory that its process used, exactly if it is done.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Sequence
from pathlib import Path

from benchmarks.algorithms.methods import METHODS
from benchmarks.learning.runs import run_once

HERE = Path(__file__).parent
SHORT = ["steps=2", "imitation.episodes=256", "evaluation.episodes=16", "critic.warmup_steps=1"]


def train(
    root: Path, tasks: Sequence[str], methods: Sequence[str], seeds: int, jobs: int, overrides: list[str]
) -> None:
    """Imitate each task once, then train from that model with each method and seed."""
    for task in tasks:
        settings = [each for each in overrides if not each.startswith("critic.")]
        run_once(HERE / f"{task}.yaml", root / task / "imitation", 0, [*settings, "steps=0"])
    cases = [(root, task, method, seed, overrides) for task in tasks for seed in range(seeds) for method in methods]
    # Each run has a parent of its own, which learns the peak memory of this run alone.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        pool.starmap(_run, cases, chunksize=1)


def _run(root: Path, task: str, method: str, seed: int, overrides: list[str]) -> None:
    settings = METHODS[method]
    unused = ("imitation.",) if "algorithm.advantage=gae" in settings else ("imitation.", "critic.")
    trimmed = [each for each in overrides if not each.startswith(unused)]
    # Tasks that were not imitated.
    start = ["imitation=null", f"model.path={root / task / 'imitation'}", "env.first_seed=500000"]
    directory = root / task / f"{method}-{seed}"
    if (directory / "peak").exists():
        return
    (directory / "done").unlink(missing_ok=True)  # of a run whose peak was not written
    try:
        run_once(HERE / f"{task}.yaml", directory, seed, [*start, *settings, *trimmed])
    except SystemExit as error:  # which would end a process of the pool without an answer
        raise RuntimeError(str(error)) from error
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    (directory / "peak").write_text(str(peak))
