"""Train with every policy loss on data of the current and of older policies, from one imitated model.

    python -m benchmarks.offpolicy             # all losses at async ratio 0 and 2; two of them also at 1 and 4
    python -m benchmarks.offpolicy --report    # only the page, from the results so far
    python -m benchmarks.offpolicy --short     # two losses, two steps, one seed: shows that it works, writes no page

Every run is an ordinary `agentkit run` in a separate process; ``--jobs`` of them run at a time. Finished runs are not
repeated, so the benchmark can be interrupted. Results: ``runs/offpolicy/results.json``, ``docs/results/offpolicy.md``
and its plots.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from agentkit import plugins
from benchmarks.learning.runs import metrics, run_once
from benchmarks.offpolicy.report import Result, table, write_report

CONFIG = Path(__file__).parent / "frozen_lake.yaml"
LOSSES = tuple(plugins.LOSS.built_in)
RATIOS = (0, 2)
SWEPT = ("ppo", "decoupled_ppo")
"""Losses that are trained at every ratio of ``SWEEP``."""
SWEEP = (0, 1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offpolicy", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one or two cores each")
    parser.add_argument("--only", nargs="+", choices=LOSSES, default=LOSSES, metavar="LOSS")
    parser.add_argument("--report", action="store_true", help="only write the page from existing results")
    parser.add_argument("--short", action="store_true", help="two losses, two steps, one seed, without the page")
    arguments = parser.parse_args()
    if arguments.short:
        root = Path("runs/offpolicy-short")
        train(root, ("ppo", "topr"), 1, arguments.jobs, ["steps=2", "imitation.episodes=256", "evaluation.episodes=16"])
        print(table(collect(root)))
        return
    root = Path("runs/offpolicy")
    if not arguments.report:
        train(root, arguments.only, arguments.seeds, arguments.jobs, [])
    results = collect(root)
    (root / "results.json").write_text(json.dumps([result.__dict__ for result in results], indent=2))
    print(write_report(results, Path("docs/results")))


def train(root: Path, losses: tuple[str, ...], seeds: int, jobs: int, overrides: list[str]) -> None:
    """Imitate once, then train from that model with each loss, async ratio and seed."""
    imitated = root / "imitation"
    run_once(CONFIG, imitated, 0, [*overrides, "steps=0"])
    start = ["imitation=null", f"model.path={imitated}", "env.first_seed=500000"]  # other tasks than those imitated

    def run(case: tuple[int, str, int]) -> None:
        seed, loss, ratio = case
        settings = [f"algorithm.loss={loss}", f"rollout.async_ratio={ratio}.0"]
        trimmed = [each for each in overrides if not each.startswith("imitation.")]
        run_once(CONFIG, root / f"{loss}-{seed}-async{ratio}", seed, [*trimmed, *start, *settings])

    cases = [
        (seed, loss, ratio)
        for seed in range(seeds)
        for loss in losses
        for ratio in (SWEEP if loss in SWEPT else RATIOS)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, cases))


def collect(root: Path) -> list[Result]:
    """Return one result for each run that is done."""
    return [_result(path.parent) for path in sorted(root.glob("*-async*/done"))]


def _result(directory: Path) -> Result:
    loss, seed, ratio = directory.name.rsplit("-", 2)
    lines = metrics(directory)
    steps = [line for line in lines if "policy/ess" in line]
    evaluations = [line["eval/success"] for line in lines if "eval/success" in line]
    return Result(
        loss=loss,
        seed=int(seed),
        ratio=int(ratio.removeprefix("async")),
        before=evaluations[0],
        after=evaluations[-1],
        ess=mean(line["policy/ess"] for line in steps),
        kl=mean(line["policy/kl_behaviour"] for line in steps),
        staleness=mean(line["staleness/mean"] for line in steps),
        curve=[line["rollout/success"] for line in steps],
    )


if __name__ == "__main__":
    main()
