"""Figures and the documentation page of the nemesis benchmark, from observed runs (pure).

Invariant: a step belongs to the phase in which it ended. The first step of each phase is not counted, because it began
under the rate of the phase before; each counted step had one rate from its beginning, and so had the idle time before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.faults.nemesis import ATTACKS
from benchmarks.faults.runs import Observed

GOAL = 1.15
"""Most mean step time under 2 % faults per minute, relative to the fault-free one."""
GOAL_RATE = 0.02
VOIDED = "gate/voided"
"""Metric of a step: the episodes without a result."""


@dataclass(frozen=True)
class Row:
    """Steps of one arm at one fault rate."""

    arm: str
    rate: float
    minutes: float
    faults: Mapping[str, int]
    """By kind, during all steps of these phases."""
    seconds: tuple[float, ...]
    """Of each counted step."""
    recoveries: tuple[tuple[str, str, float], ...]
    """Cause, what replaced the environment, and seconds from the detection until it answered again."""
    voided: int


def rows(arm: str, runs: Sequence[Observed]) -> list[Row]:
    """Return one row for each fault rate, over all phases of all runs of an arm."""
    return [_row(arm, rate, runs) for rate in sorted({phase.rate for run in runs for phase in run.phases})]


def _row(arm: str, rate: float, runs: Sequence[Observed]) -> Row:
    seconds, faults, minutes, voided, recoveries = [], Counter(), 0.0, 0, []
    for run in runs:
        for phase in run.phases:
            if phase.rate != rate:
                continue
            within = [step for step in run.steps if phase.start < step["time"] <= phase.end]
            seconds += [step["time/step"] for step in within[1:]]
            voided += sum(int(step.get(VOIDED, 0)) for step in within)
            faults.update(fault.kind for fault in run.faults if phase.start < fault.at <= phase.end)
            for one in run.recoveries:
                if phase.start < one["time"] <= phase.end:
                    recoveries += [(one["cause"], one["by"], one["seconds"])] * one["episodes"]
            minutes += (phase.end - phase.start) / 60
    return Row(arm, rate, minutes, dict(faults), tuple(seconds), tuple(recoveries), voided)


def ratio(faulty: Sequence[float], clean: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of means, and the bounds of its 95 % bootstrap interval over steps."""
    rng = random.Random(seed)
    drawn = sorted(
        fmean(rng.choices(faulty, k=len(faulty))) / fmean(rng.choices(clean, k=len(clean))) for _ in range(2000)
    )
    return fmean(faulty) / fmean(clean), drawn[49], drawn[1949]


def problems(runs: Sequence[Observed], faults: int) -> list[str]:
    """Return what a run must not do: end with an error, lose an episode, leave a container, or meet too few faults."""
    found = []
    for run in runs:
        voided = sum(int(step.get(VOIDED, 0)) for step in run.steps)
        found += [
            *([f"the run ended with {run.exit_code}"] if run.exit_code else []),
            *([f"{voided} episodes were voided"] if voided else []),
            *([f"{run.left} containers are left"] if run.left else []),
            *([f"only {len(run.faults)} faults were injected"] if len(run.faults) < faults else []),
            *([] if run.recoveries else ["no episode was recovered"]),
        ]
    return found


def table(found: Sequence[Row]) -> str:
    """Return a Markdown table; ratios are relative to the fault-free steps of the same arm."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for row in found:
        clean = next((other for other in found if other.arm == row.arm and not other.rate), None)
        lines.append("| " + " | ".join(_cells(row, clean)) + " |")
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "redundancy", "faults per minute", "minutes", "killed, paused, frozen, slowed", "steps", "mean step s",
    "median", "max", "mean ÷ fault-free", "median ÷ fault-free", "goal", "met", "recoveries", "voided",
)  # fmt: skip


def _cells(row: Row, clean: Row | None) -> list[str]:
    kinds = ", ".join(str(row.faults.get(kind, 0)) for kind in ATTACKS) if row.rate else ""
    cells = [row.arm, f"{row.rate:.0%}" if row.rate else "none", f"{row.minutes:.1f}", kinds, str(len(row.seconds))]
    if not row.seconds:
        return cells + [""] * (len(_COLUMNS) - len(cells))
    cells += [f"{value:.2f}" for value in (fmean(row.seconds), median(row.seconds), max(row.seconds))]
    if row.rate and clean is not None and clean.seconds:
        mean, low, high = ratio(row.seconds, clean.seconds)
        cells += [f"{mean:.2f} ({low:.2f} to {high:.2f})", f"{median(row.seconds) / median(clean.seconds):.2f}"]
        cells += [f"≤ {GOAL}", _met(low, high)] if row.rate == GOAL_RATE else ["", ""]
    else:
        cells += [""] * 4
    return [*cells, str(len(row.recoveries)), str(row.voided)]


def _met(low: float, high: float) -> str:
    """Say whether a ratio in this interval meets the goal."""
    if high <= GOAL:
        return "yes"
    return "**no**" if low > GOAL else "undecided"


def recoveries(found: Sequence[Row]) -> str:
    """Return a Markdown table of the recoveries under all rates, by cause and means."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for row in found:
        for cause, by, taken in row.recoveries:
            seconds.setdefault((cause, by), []).append(taken)
    lines = ["| cause | replaced by | recoveries | median s | max s |", "|---|---|---|---|---|"]
    for (cause, by), taken in sorted(seconds.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {cause} | {by} | {len(taken)} | {median(taken):.2f} | {max(taken):.2f} |")
    return "\n".join(lines) + "\n"


PAGE = """# Step time under faults

`python -m benchmarks.faults` writes this page. It trains a small model on FrozenLake-v1 with `agentkit run`, in Docker,
with one environment in each container. A fault injector kills (`docker kill`), pauses (`docker pause`), freezes
(`docker kill --signal STOP`, which the engine does not report) or slows (`docker update --cpus 0.01`) running
containers of the run, each kind with the same probability. The times between two faults are random and exponentially
distributed. No container is attacked twice.

{machine}

{table}
Recoveries of episodes under all rates, in seconds from the detection of the fault until the episode goes on:

{recoveries}
Each step trains on {groups} groups of {size} episodes, synchronously (async ratio 0): the slowest episode delays the
step. A run keeps one container for each of its episodes, and one spare. With hedged calls (`env.hedge: p95`), a call
that takes longer than 95 % of the past ones is also made in a second container. With rollout redundancy, a step starts
{more} groups of {larger}, and uses the first {groups} groups of {size} to finish.

- The rate is the expected share of the running containers that is attacked per minute. It changes between two steps of
  the same run: none, 2 %, 20 %, 20 %, 2 %, none. After each phase, the containers that are still paused, frozen or
  slowed are restored. The first step of each phase is not counted, because it began under the rate of the phase before.
  Runs with different redundancy alternate.
- A step lasts from the request of a batch until its weights are published. Ratios are relative to the fault-free
  steps of the same runs. In brackets: the 95 % interval of the ratio of means, by bootstrap over steps. The goal is
  met if the whole interval meets it, and `undecided` if only a part of the interval does.
- The model's weights hardly change (learning rate 1e-9), so that all steps do the same work.
- The fault-free phases are the first and the last of a run. A ratio below 1 shows how much steps differ for other
  reasons.
- A fault costs time, not a share of a step: longer steps hide more of it. {cost}
"""


def page(found: Sequence[Row], machine: str, rollout: Mapping[str, int], extra: Mapping[str, int]) -> str:
    """Return the documentation page; ``rollout`` and ``extra`` are rollout settings of all arms and of the last."""
    return PAGE.format(
        machine=machine,
        table=table(found),
        recoveries=recoveries(found),
        groups=rollout["groups"],
        size=rollout["group_size"],
        more=rollout["groups"] + extra["extra_groups"],
        larger=rollout["group_size"] + extra["extra_members"],
        cost=" ".join(_costs(found)),
    )


def _costs(found: Sequence[Row]) -> list[str]:
    """Say how much time the faults of each arm cost in total."""
    said = []
    for arm in dict.fromkeys(row.arm for row in found):
        clean = next(row for row in found if row.arm == arm and not row.rate)
        faulty = [row for row in found if row.arm == arm and row.rate and row.seconds]
        faults, steps = sum(sum(row.faults.values()) for row in faulty), sum(len(row.seconds) for row in faulty)
        if clean.seconds and steps:
            lost = sum(len(row.seconds) * (fmean(row.seconds) - fmean(clean.seconds)) for row in faulty)
            said.append(f"With {arm}, {steps} steps with {faults} faults took {lost:+.1f} s in total,")
            said.append("relative to as many fault-free steps.")
    return said
