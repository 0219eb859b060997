"""Compare AsyPPO (two small critics) with PPO (one critic of the policy's size) and GRPO, from one imitated model.

    python -m benchmarks.critics             # every method, 3 seeds
    python -m benchmarks.critics --report    # only the page, from the results so far
    python -m benchmarks.critics --short     # two steps, one seed: shows that it works, writes no page

Every run is an ordinary `agentkit run` in a separate process; ``--jobs`` of them run at a time. Finished runs are not
repeated, so the benchmark can be interrupted. Results: ``runs/critics/results.json``, ``docs/results/critics.md`` and
its plot.
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
from benchmarks.critics.report import Result, table, write_report
from benchmarks.critics.training import METHODS, SHORT, train
from benchmarks.learning.runs import metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.critics", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--report", action="store_true", help="only write the page from existing results")
    parser.add_argument("--short", action="store_true", help="two steps, one seed, without the page")
    arguments = parser.parse_args()
    root = Path("runs/critics-short" if arguments.short else "runs/critics")
    if arguments.short:
        train(root, arguments.only, 1, arguments.jobs, SHORT)
        print(table(collect(root)))
        return
    if not arguments.report:
        train(root, arguments.only, arguments.seeds, arguments.jobs, [])
    results = collect(root)
    (root / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=2))
    print(write_report(results, Path("docs/results")))


def collect(root: Path) -> list[Result]:
    """Return one result for each run that is done."""
    return [_result(path.parent) for path in sorted(root.glob("*-[0-9]*/peak"))]


def _result(directory: Path) -> Result:
    method, seed = directory.name.rsplit("-", 1)
    config = load_config(directory / "config.yaml")
    policy = read_architecture(config.model.path)
    planned = memory.learner(config, policy, critic_architecture(config, policy))
    lines = metrics(directory)
    steps = [line for line in lines if "time/step" in line]
    evaluations = [line["eval/success"] for line in lines if "eval/success" in line]
    trained = steps[-1]
    return Result(
        method=method,
        seed=int(seed),
        before=evaluations[0],
        after=evaluations[-1],
        step_s=median(line["time/step"] for line in steps),
        train_s=median(line["time/train"] for line in steps),
        peak_bytes=int((directory / "peak").read_text()),
        held_bytes=sum(planned.held.values()) - planned.host,
        explained_variance=trained.get("critic/explained_variance"),
        curve=[line["rollout/success"] for line in steps],
    )


if __name__ == "__main__":
    main()
