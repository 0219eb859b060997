"""Train SmolLM2-135M-Instruct on arithmetic by reinforcement alone, and compare methods on it.

    python -m benchmarks.smollm2                         # every method with its seeds
    python -m benchmarks.smollm2 --only grpo --seeds 1
    python -m benchmarks.smollm2 --report                # only the page, from the results so far

Every run is `agentkit run examples/smollm2.yaml` with the settings of its method, in a separate process, one at a time.
Finished runs are not repeated, so the benchmark can be interrupted. Runs: ``runs/smollm2_benchmark``; page:
``docs/results/smollm2.md`` and its plot.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.learning.runs import run_once
from benchmarks.smollm2.methods import METHODS
from benchmarks.smollm2.report import write_report
from benchmarks.smollm2.results import collect

CONFIG = Path("examples/smollm2.yaml")
ROOT = Path("runs/smollm2_benchmark")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--report", action="store_true", help="only write the page from existing results")
    parser.add_argument("--run", nargs=2, metavar=("METHOD", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run[0], int(arguments.run[1]))
        return
    if not arguments.report:
        for seed in range(arguments.seeds):
            for name in arguments.only:
                if not (ROOT / f"{name}-{seed}" / "peak").exists():
                    # Each run has a parent of its own, which learns the peak memory of this run alone.
                    subprocess.run([sys.executable, "-m", "benchmarks.smollm2", "--run", name, str(seed)], check=True)
    print(write_report(collect(ROOT), Path("docs/results")))


def run(name: str, seed: int) -> None:
    """Run one method with one seed, and write the peak memory of its largest process."""
    directory = ROOT / f"{name}-{seed}"
    (directory / "done").unlink(missing_ok=True)  # of a run whose peak was not written
    run_once(CONFIG, directory, seed, METHODS[name].settings)
    (directory / "peak").write_text(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024))


if __name__ == "__main__":
    main()
