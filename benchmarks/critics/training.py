"""The methods that are compared, and their runs: each in a separate process, once.

Invariant: a run's directory contains ``peak``, the most bytes of memory that its process used, exactly if it is done.
"""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

from benchmarks.learning.runs import run_once

CONFIG = Path(__file__).parent / "frozen_lake.yaml"
SHORT = ["steps=2", "imitation.episodes=256", "evaluation.episodes=16", "critic.warmup_steps=1"]
_PPO = ["algorithm.advantage=gae", "critic.lr=2e-3", "critic.updates=2", "critic.warmup_steps=8"]
_SMALL = [*_PPO, "critic.count=2", "critic.layers=2", "critic.hidden_size=64"]
METHODS = {
    "grpo": ["algorithm.advantage=grpo"],
    "ppo": _PPO,
    "asyppo": _SMALL,
    "asyppo_advantage_mask_only": [*_SMALL, "algorithm.entropy_mask=0"],
    "asyppo_entropy_mask_only": [*_SMALL, "algorithm.advantage_mask=0"],
    "asyppo_no_mask": [*_SMALL, "algorithm.advantage_mask=0", "algorithm.entropy_mask=0"],
}
"""Settings of each method. All use the same tasks, episodes per step, steps and loss."""


def train(root: Path, methods: list[str], seeds: int, jobs: int, overrides: list[str]) -> None:
    """Imitate once, then train from that model with each method and seed."""
    run_once(CONFIG, root / "imitation", 0, [*(each for each in overrides if "critic." not in each), "steps=0"])
    cases = [(root, method, seed, overrides) for seed in range(seeds) for method in methods]
    # Each run has a parent of its own, which learns the peak memory of this run alone.
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        pool.starmap(_run, cases, chunksize=1)


def _run(root: Path, method: str, seed: int, overrides: list[str]) -> None:
    settings = METHODS[method]
    unused = ("imitation.",) if "algorithm.advantage=gae" in settings else ("imitation.", "critic.")
    trimmed = [each for each in overrides if not each.startswith(unused)]
    start = ["imitation=null", f"model.path={root / 'imitation'}", "env.first_seed=500000"]  # not the imitated tasks
    directory = root / f"{method}-{seed}"
    if (directory / "peak").exists():
        return
    (directory / "done").unlink(missing_ok=True)  # of a run whose peak was not written
    try:
        run_once(CONFIG, directory, seed, [*start, *settings, *trimmed])
    except SystemExit as error:  # which would end a process of the pool without an answer
        raise RuntimeError(str(error)) from error
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    (directory / "peak").write_text(str(peak))
