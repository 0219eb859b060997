"""Predict published speed-ups of asynchronous training, and simulate a large cluster.

    python -m benchmarks.scale.published                  # about two minutes of processor time
    python -m benchmarks.scale.published --only large     # 1,024 GPUs and 100,000 environments: about ten

Each part replaces its results; all that are known are written to docs/results/training_scale.md. The published figures
are those of ROLL Flash (Lu et al. 2025, arXiv:2510.11345).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agentkit.trainers.planning.throughput import CONTROLLER_S, Rates, colocated_s, step_s
from benchmarks.scale.training import Setup, Work, simulate

RESULTS, PAGE_PATH = Path("benchmarks/results/training_scale.json"), Path("docs/results/training_scale.md")
DRAWS = 1 << 16

TURNS = 23
"""Calibrated: the turns after which lock-step episodes of 256 environments take the published 892 s."""
MEDIAN_TO_LONGEST = 20
"""Published: the longest answers exceed 20 times the median."""
SCALE = 4
"""The RLVR rows simulate a quarter of 256 prompts with 16 answers, on engines that a quarter of the requests crowd."""
CROWDED = 60.0
"""Calibrated: engine-GPU-seconds per batch beyond the longest answer, in units of the median answer."""
TRAINING = 200.0
"""Calibrated: learner-GPU-seconds per batch."""
SPLITS = {16: (4, 5, 6, 7), 40: (20, 22, 24, 26, 28), 128: (64, 76, 88)}


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def latency() -> dict[str, Any]:
    """Environment-level asynchrony: 256 environments with steps of N(10, 10) seconds, clipped at 0."""
    steps = np.maximum(draws().normal(10, 10, DRAWS), 0)
    work = Work(answers=np.zeros(1), steps=steps, turns=TURNS)
    turn = np.array([[work.step_s(group, member, 0) for member in range(8)] for group in range(32 * 200)])
    lock_step = TURNS * float(turn.reshape(200, 256).max(axis=1).mean())
    return {"lock_step": lock_step, **asdict(simulate(Setup(work, engines=8, steps=4)))}


def answers() -> np.ndarray:
    """Answers of median 1; the longest of 4,096 is expected 3.5 standard deviations above the median."""
    longest = float(MEDIAN_TO_LONGEST)
    return np.minimum(draws().lognormal(0, np.log(longest) / 3.5, DRAWS), longest)


def rlvr() -> list[dict[str, Any]]:
    """Synchronous steps on all GPUs, and splits of the same GPUs between engines and learner."""
    lengths = answers()
    work = Work(lengths, np.zeros(1))
    crowd = 4096 / SCALE * float(lengths.mean()) / CROWDED
    rates = Rates(CROWDED, TRAINING, MEDIAN_TO_LONGEST, 4096)
    rows = []

    def add(gpus: int, engines: int, ratio: float) -> None:
        learners = gpus - engines or gpus
        warmup, steps = (2, 3) if ratio else (0, 1)
        setup = Setup(
            work,
            engines,
            train_s=TRAINING / learners,
            groups=256 // SCALE,
            size=16,
            async_ratio=ratio,
            crowd=crowd,
            warmup=warmup,
            steps=steps,
        )
        closed = step_s(rates, engines, learners, ratio) if ratio else colocated_s(rates, gpus)
        rows.append({"gpus": gpus, "engines": engines, "ratio": ratio, "closed": closed, **asdict(simulate(setup))})
        print(f"{gpus} GPUs, {engines} engines, async ratio {ratio:g}: {rows[-1]['step_s']:.2f}", flush=True)

    for gpus, splits in SPLITS.items():
        add(gpus, gpus, 0.0)
        for engines in splits:
            add(gpus, engines, 2.0)
    for ratio in (1.0, 4.0):
        add(40, 24, ratio)
    return rows


LARGE: dict[str, Any] = {
    "gpus": 1024,
    "engines": 700,
    "groups": 2083,
    "size": 16,
    "turns": 2,
    "async_ratio": 2.0,
    "train_s": 8.0,
}


def large() -> dict[str, Any]:
    """A cluster of 1,024 GPUs: 700 engines, and 100,000 environments with steps of 2 s on average."""
    rng = draws()
    lengths = np.minimum(rng.lognormal(0, 0.86, DRAWS), MEDIAN_TO_LONGEST)
    work = Work(lengths, rng.exponential(2.0, DRAWS), turns=2)
    setup = Setup(work, engines=700, train_s=8.0, groups=2083, size=16, async_ratio=2.0, crowd=26.5, steps=2)
    shown = {"engines": setup.engines, "groups": setup.groups, "size": setup.size, "async_ratio": setup.async_ratio}
    return shown | asdict(simulate(setup))


def page(results: dict[str, Any]) -> str:
    """Return the documentation page of what was simulated."""
    parts = {"latency": latency_text, "rlvr": rlvr_text, "large": large_text}
    return PAGE.format(
        **{name: show(results[name]) if name in results else "Not simulated yet.\n" for name, show in parts.items()}
    )


def latency_text(found: dict[str, Any]) -> str:
    speedup = found["lock_step"] / found["step_s"]
    return LATENCY.format(**found, turns_each=TURNS, speedup=speedup, off=100 * (speedup / (892 / 362) - 1))


def rlvr_text(rows: list[dict[str, Any]]) -> str:
    sync = {row["gpus"]: row for row in rows if not row["ratio"]}
    splits = [row for row in rows if row["ratio"] == 2]
    best = {gpus: min((row for row in splits if row["gpus"] == gpus), key=lambda row: row["step_s"]) for gpus in SPLITS}
    chosen = next(row for row in splits if (row["gpus"], row["engines"]) == (40, 24))
    ratios = [row for row in rows if (row["gpus"], row["engines"]) == (40, 24)]
    closed = [row["closed"] / row["step_s"] - 1 for row in rows]
    speedup = {gpus: sync[gpus]["step_s"] / best[gpus]["step_s"] for gpus in SPLITS}
    split_rows = "\n".join(
        f"| {row['engines']} / {row['gpus'] - row['engines']} | {sync[40]['step_s'] / row['step_s']:.2f} | "
        f"{row['engine_share']:.0%} |"
        for row in splits
        if row["gpus"] == 40
    )
    ratio_rows = "\n".join(
        f"| {row['ratio']:g} | {sync[40]['step_s'] / row['step_s']:.2f} | {row['staleness']:.2f} |"
        for row in sorted(ratios, key=lambda row: row["ratio"])
    )
    return RLVR.format(
        at_24=sync[40]["step_s"] / chosen["step_s"],
        best=best[40]["engines"],
        rest=40 - best[40]["engines"],
        lead=100 * (chosen["step_s"] / best[40]["step_s"] - 1),
        at_128=speedup[128],
        off_128=100 * (speedup[128] / 2.18 - 1),
        scaling=best[16]["step_s"] / best[128]["step_s"],
        off_scaling=100 * (best[16]["step_s"] / best[128]["step_s"] / 7.6 - 1),
        split_rows=split_rows,
        ratio_rows=ratio_rows,
        low=100 * min(closed),
        high=100 * max(closed),
    )


def large_text(found: dict[str, Any]) -> str:
    return LARGE_TEXT.format(**found, most_s=found["turns"] * CONTROLLER_S)


LATENCY = """\
| | published | simulated |
|---|---|---|
| all environments in lock-step | 892 s | {lock_step:,.0f} s (calibrated: {turns_each} turns) |
| each environment by itself | 362 s | {step_s:,.0f} s |
| speed-up | 2.46 | {speedup:.2f} ({off:+.0f} %) |
"""

RLVR = """\
| figure | published | simulated |
|---|---|---|
| speed-up on 40 GPUs, 24 engines and 16 for the learner | about 2 | {at_24:.2f} (calibrated) |
| best split of 40 GPUs | 24 / 16 | {best} / {rest}, {lead:.1f} % faster than 24 / 16 |
| speed-up on 128 GPUs | 2.12 to 2.24 | {at_128:.2f} ({off_128:+.0f} % of 2.18) |
| throughput with 8 times the GPUs (here 128 and 16) | 7.6 | {scaling:.2f} ({off_scaling:+.0f} %) |

| engines / learner, 40 GPUs, async ratio 2 | speed-up | engines compute |
|---|---|---|
{split_rows}

| async ratio, 24 / 16 | speed-up | mean staleness |
|---|---|---|
{ratio_rows}

The closed forms behind `agentkit plan --gpus` differ from the simulated step times by {low:+.0f} to {high:+.0f} %. They
assume that work is spread evenly over engines, which it is not.
"""

LARGE_TEXT = """\
1,024 GPUs, {engines} of them engines; batches of {groups:,} groups of {size}, async ratio {async_ratio:g},
episodes of 2 turns.

- At most {at_once:,} environments were in use at one time. {episodes:,} episodes were started, and each ended exactly
  once. The mean staleness of trained groups was {staleness:.2f}.
- {turns:,} turns. At 170 µs per turn they need {most_s:,.0f} s of one processor core.
"""

PAGE = """# Training at scale

`python -m benchmarks.scale.published` writes this page; `--only latency`, `rlvr` or `large` replaces one part. The
rollout loop, the gate and the router are the real ones. Engines, learner, environments and time are simulated, so the
figures do not depend on the machine.

The model has few parts. An answer takes a given time on an engine that computes nothing else; with `b` requests at
once, each is `1 + b / crowd` times as slow, because a decoding step reads the weights once and the cache of each
sequence. Environment steps and training steps take given times. Prompts and weight updates cost nothing.

## Published speed-ups

The published figures are those of ROLL Flash ([arXiv:2510.11345](https://arxiv.org/abs/2510.11345)), as secondary
sources quote them; its full text was not available. Some constants are calibrated on one row, and the other rows are
predictions.

**Environments with random latency.** 256 environments whose steps take 10 ± 10 s (normal, clipped at 0). The number
of turns is not published; it is calibrated on the time of lock-step episodes. Generation takes no time.

{latency}
**Reasoning without an environment.** 256 prompts with 16 answers of lognormal length per step. Published are the
number of prompts, the GPUs, and that the longest answers exceed 20 times the median. Assumed are 16 answers, and
synchronous steps in which all GPUs generate and then all train. Two constants are calibrated on the row of 40 GPUs:
the work of generation and that of training. A quarter of the work is simulated, on engines that a quarter of the
requests crowd.

{rlvr}
What this does not show: the batch, the lengths and the baselines of the runs on 16 and 128 GPUs are not known, and
the same work is simulated for all of them. With a fixed batch the longest answer limits the throughput of 128 GPUs;
the published 7.6 is possible only if the longest answer matters less than in this model.

Not predicted, because no setup is known: ALFWorld (2.72) and SWE (1.81), which depend on the latencies and failures
of their environments; queue scheduling and prompt replication, which depend on lengths and on filtering; redundant
environments (243 s to 45 s), whose latencies of 10 ± 5 s alone do not explain a step of 243 s.

## A large cluster

{large}
One core handles about 5,900 turns per second (170 µs for rollout loop, channel and router, measured separately). With
5,000 tokens per second and GPU, that is the limit for about 350 engine GPUs at 300 tokens per turn, and for 1,200 at
1,000 tokens. `agentkit plan --gpus` prints this limit for a configuration.
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.published", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = {"latency": latency, "rlvr": rlvr, "large": large}
    parser.add_argument("--only", choices=parts)
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in [asked.only] if asked.only else [name for name in parts if name != "large"]:
        known[name] = parts[name]()
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE_PATH.write_text(page(known))
    print(f"written to {PAGE_PATH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
