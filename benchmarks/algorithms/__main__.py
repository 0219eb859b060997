"""Compare AsyPPO (two small critics) with PPO (one critic of the policy's size), and attention-rhythm credit with GRPO.

    python -m benchmarks.algorithms             # every task and method, 3 seeds
    python -m benchmarks.algorithms --report    # only the page, from the results so far
    python -m benchmarks.algorithms --short     # two steps, one task and seed: shows that it works, writes no page

Every run is an ordinary `agentkit run` in a separate process; ``--jobs`` of them run at a time. Finished runs are not
repeated, so the benchmark can be interrupted. Results: ``runs/algorithms/results.json``, ``docs/results/algorithms.md``
and its plots.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

from agentkit.config_io import load_config
from agentkit.trainers.planning import memory
from agentkit.trainers.planning.architecture import critic_architecture, read_architecture
from benchmarks.algorithms.methods import METHODS, TASKS
from benchmarks.algorithms.report import Result, tables, write_report
from benchmarks.algorithms.training import SHORT, train
from benchmarks.learning.runs import metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.algorithms", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--report", action="store_true", help="only write the page from existing results")
    parser.add_argument("--short", action="store_true", help="two steps, one task and seed, without the page")
    arguments = parser.parse_args()
    root = Path("runs/algorithms-short" if arguments.short else "runs/algorithms")
    if arguments.short:
        train(root, arguments.tasks[:1], arguments.only, 1, arguments.jobs, SHORT)
        print(tables(collect(root)))
        return
    if not arguments.report:
        train(root, arguments.tasks, arguments.only, arguments.seeds, arguments.jobs, [])
    results = collect(root)
    (root / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=2))
    print(write_report(results, Path("docs/results")))


def collect(root: Path) -> list[Result]:
    """Return one result for each run that is done."""
    return [_result(path.parent) for path in sorted(root.glob("*/*-[0-9]*/peak"))]


def _result(directory: Path) -> Result:
    method, seed = directory.name.rsplit("-", 1)
    config = load_config(directory / "config.yaml")
    policy = read_architecture(config.model.path)
    planned = memory.learner(config, policy, critic_architecture(config, policy))
    lines = metrics(directory)
    steps = [line for line in lines if "time/step" in line]
    evaluations = [line["eval/success"] for line in lines if "eval/success" in line]
    return Result(
        task=directory.parent.name,
        method=method,
        seed=int(seed),
        before=evaluations[0],
        after=evaluations[-1],
        step_s=median(line["time/step"] for line in steps),
        train_s=median(line["time/train"] for line in steps),
        peak_bytes=int((directory / "peak").read_text()),
        held_bytes=sum(planned.held.values()) - planned.host,
        explained_variance=steps[-1].get("critic/explained_variance"),
        curve=[line["rollout/success"] for line in steps],
    )


if __name__ == "__main__":
    main()
