"""Whether a cluster learns as one process does: ``examples/cluster.yaml`` on two simulated nodes, and inline.

Both arms of a seed train from the same imitated model, on the same tasks, with the same settings. On the cluster, each
node has one engine and one learner rank.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentkit.trainers.cluster import ray_cluster  # noqa: F401 (sets the variables that Ray reads)

EXAMPLE = Path("examples/cluster.yaml")
RUNS = Path("benchmarks/results/distributed-learning")
INLINE = ("cluster=null", "engine.replicas=1", "engine.max_batch=128", "learner.ranks=1")
NODES = 2
RUN_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    arm: str
    seed: int
    before: float
    after: float
    """Success rates on the evaluation tasks."""
    step_s: float
    """Median duration of a step."""


def measure(seeds: Sequence[int], *, steps: int = 32) -> list[Learned]:
    """Train both arms with each seed, in turn."""
    found = []
    for seed in seeds:
        imitated = RUNS / f"imitation-{seed}"
        _run(imitated, seed, [*INLINE, "steps=0"])
        # Tasks of reinforcement learning are not those that were imitated.
        trained = ["imitation=null", f"model.path={imitated / 'model'}", "env.first_seed=500000", f"steps={steps}"]
        _run(RUNS / f"inline-{seed}", seed, [*trained, *INLINE])
        with _two_nodes() as address:
            placed = [f"cluster.address={address}", "engine.resources={engine: 1}", "learner.resources={rank: 1}"]
            _run(RUNS / f"cluster-{seed}", seed, [*trained, *placed])
        found += [_learned(arm, seed) for arm in ("inline", "cluster")]
    return found


def _learned(arm: str, seed: int) -> Learned:
    lines = [json.loads(line) for line in (RUNS / f"{arm}-{seed}" / "metrics.jsonl").read_text().splitlines()]
    success = [line["eval/success"] for line in lines if "eval/success" in line]
    steps = [line["time/step"] for line in lines if "time/step" in line]
    return Learned(arm, seed, success[0], success[-1], statistics.median(steps))


def _run(directory: Path, seed: int, overrides: Sequence[str]) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    command = [sys.executable, "-m", "agentkit", "run", str(EXAMPLE), f"dir={directory}", f"seed={seed}", *overrides]
    subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def _two_nodes() -> Iterator[str]:
    """Start a cluster of two nodes on this machine, each with room for one engine and one rank; yield its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=2, resources={"engine": 1, "rank": 1}, include_dashboard=False)
        yield str(cluster.address)
    finally:
        cluster.shutdown()
