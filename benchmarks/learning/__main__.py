"""Measure success after imitation and after reinforcement learning, compared with expert and random play.

    python -m benchmarks.learning                       # every setting, with its seeds and async ratios
    python -m benchmarks.learning --only frozen_lake --seeds 1
    python -m benchmarks.learning --report              # only the table and the plots, from the results so far

Every run is an ordinary `agentkit run` in a separate process; ``--jobs`` of them run at a time. Finished runs are not
repeated, so the benchmark can be interrupted. Results: ``runs/learning/results.json``,
``docs/results/learning.md`` (the table) and one plot per setting beside it.
"""

from __future__ import annotations

import argparse
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.learning.references import expert_and_random
from benchmarks.learning.report import write_report
from benchmarks.learning.runs import metrics, run_once
from benchmarks.learning.settings import SETTINGS, Setting

ROOT = Path("runs/learning")
_IMITATING = threading.Lock()
"""Held while a model imitates: several seeds may wait for the same one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one or two cores each")
    parser.add_argument("--only", choices=[setting.name for setting in SETTINGS])
    parser.add_argument("--report", action="store_true", help="only write table and plots from existing results")
    arguments = parser.parse_args()
    chosen = [setting for setting in SETTINGS if arguments.only in (None, setting.name)]
    if not arguments.report:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            pairs = [(setting, seed) for seed in range(arguments.seeds) for setting in chosen if seed < setting.seeds]
            list(pool.map(lambda pair: _seed_of_setting(*pair), pairs))
    results = [collect(setting) for setting in SETTINGS]
    results = [result for result in results if result["seeds"]]
    ROOT.mkdir(parents=True, exist_ok=True)
    (ROOT / "results.json").write_text(json.dumps(results, indent=2))
    print(write_report(results, Path("docs/results")))


def _seed_of_setting(setting: Setting, seed: int) -> None:
    """Run imitation once, then reinforcement learning from its model at each async ratio."""
    teacher = 0 if setting.one_imitation else seed
    imitated = ROOT / f"{setting.name}-{teacher}-imitation"
    with _IMITATING:
        run_once(setting.config, imitated, teacher, ["steps=0"])
    for ratio in setting.ratios:
        target = ROOT / f"{setting.name}-{seed}-async{ratio:g}"
        first = 500_000  # RL tasks differ from those that were imitated
        run_once(
            setting.config,
            target,
            seed,
            ["imitation=null", f"model.path={imitated}", f"rollout.async_ratio={ratio}", f"env.first_seed={first}"],
        )


def collect(setting: Setting) -> dict[str, Any]:
    """Return the evaluations and training curves of a setting, per seed and async ratio."""
    seeds: dict[int, dict[str, Any]] = {}
    for path in sorted(ROOT.glob(f"{setting.name}-[0-9]*-async*/done")):
        _, seed, ratio = path.parent.name.rsplit("-", 2)
        lines = metrics(path.parent)
        evaluations = [(line["step"], line["eval/success"]) for line in lines if "eval/success" in line]
        steps = [line for line in lines if "rollout/success" in line]
        seeds.setdefault(int(seed), {})[ratio.removeprefix("async")] = {
            "before": evaluations[0][1],
            "after": evaluations[-1][1],
            "curve": [line["rollout/success"] for line in steps],
            "seconds": sum(line["time/step"] for line in steps),
            "staleness": sum(line["staleness/mean"] for line in steps) / max(len(steps), 1),
        }
    references = expert_and_random(setting.config) if seeds else {}
    return {"name": setting.name, "title": setting.title, "seeds": seeds, **references}


if __name__ == "__main__":
    main()
