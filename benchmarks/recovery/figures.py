"""Figures and the documentation page of the recovery benchmark (pure).

Invariant: a goal counts as met only if every measured case met it; if only the median did, the table says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Goal:
    """Upper bounds in seconds."""

    detected: float | None = None
    """From the fault until it is detected."""
    answered: float | None = None
    """From the fault, or from its detection if that has a bound, until the next step is answered."""

    def __str__(self) -> str:
        if self.detected is not None and self.answered is not None:
            return f"detected < {self.detected:g} s, then < {self.answered:g} s"
        if self.detected is not None:
            return f"detected < {self.detected:g} s"
        return "" if self.answered is None else f"< {self.answered:g} s"

    def met(self, detected: float | None, answered: float) -> bool:
        """Return whether one case, in seconds since the fault, met the goal."""
        if self.detected is None:
            return self.answered is None or answered < self.answered
        if detected is None or detected >= self.detected:
            return False
        return self.answered is None or answered - detected < self.answered


NO_GOAL = Goal()


@dataclass(frozen=True)
class Sample:
    """One disturbed episode. Times are seconds since the fault."""

    detected: float | None
    """None if nothing noticed the fault before the step was answered."""
    answered: float
    by: str = ""
    """What replaced the environment."""


@dataclass(frozen=True)
class Row:
    """One fault, with one setting of redundancy."""

    env: str
    fault: str
    redundancy: str
    goal: Goal
    samples: tuple[Sample, ...]
    voided: int
    """Episodes without a result; for an environment that is not replayed, the attempts that were repeated."""
    note: str = ""
    """Why it was not measured."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Row:
        """Return the row that was saved as plain data."""
        samples = tuple(Sample(**sample) for sample in saved["samples"])
        return cls(**{**saved, "goal": Goal(**saved["goal"]), "samples": samples})

    @property
    def met(self) -> str:
        """``yes``, ``median only``, ``no``, or empty without a goal."""
        if self.goal == NO_GOAL or not self.samples:
            return ""
        if all(self.goal.met(one.detected, one.answered) for one in self.samples):
            return "yes"
        known = [one.detected for one in self.samples if one.detected is not None]
        middle = median(known) if known else None
        typical = self.goal.met(middle, median(one.answered for one in self.samples))
        return "median only" if typical else "**no**"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table, and below it the rows that could not be measured."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows if row.samples]
    notes = [f"- {row.env}, {row.fault}, {row.redundancy}: not measured. {row.note}" for row in rows if not row.samples]
    return "\n".join([*lines, "", *notes]) + ("\n" if notes else "")


_COLUMNS = (
    "environment", "fault", "redundancy", "n", "replaced by", "detected p50", "max", "next step p50", "max", "goal",
    "met", "voided",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    detected = [one.detected for one in row.samples if one.detected is not None]
    answered = [one.answered for one in row.samples]
    means = sorted({one.by for one in row.samples if one.by})
    times = [_time(median(detected)), _time(max(detected))] if detected else ["", ""]
    times += [_time(median(answered)), _time(max(answered))]
    goal = [str(row.goal), row.met, str(row.voided)]
    return [row.env, row.fault, row.redundancy, str(len(row.samples)), ", ".join(means), *times, *goal]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


PAGE = """# Recovery of episodes

`python -m benchmarks.recovery` writes this page. It plays episodes of each environment in Docker, with the same pool of
environments as a run and with the expert's actions, and lets containers and hosts fail.

{machine}

{table}
- **Times** begin before the fault is caused and end when the disturbed episode's next step is answered, after a replay
  of the first half of its actions. The next step is called at once after the fault, without time for a model to think.
  `detected` is the time until the recovery begins. It is empty if the step was answered before anything was detected.
- **Goals** are met if every case met them; `median only` means that some case did not.
- **Voided** episodes have no result. SWEBench-v0 is not replayed: each of its disturbed episodes starts again from its
  seed, counts as one voided attempt, and its next step is the first observation of the second attempt.
- {concurrency} episodes are played at the same time, each in its own container (`env.sandbox_share: 1`). Before each
  fault, all spares and standbys are ready.
- `container killed`: SIGKILL to the container's first process. For SWEBench-v0, `docker kill`, whose own time is
  included. `container paused`: `docker pause`, which the engine reports. `container frozen`: `docker kill --signal
  STOP`, which it does not report. The time of these two commands is included. `slow reset`: the environment's process
  is stopped for 3 s before `reset`, while its container answers; the time is that of `reset`.
- `host …`: two processes of `agentkit sandbox serve` on this machine, which stand for hosts. One of them gets SIGKILL
  (connections are refused) or SIGSTOP (it is silent). All episodes on it are disturbed at the same time. With
  `spares`, there is one for each episode. Both servers share the CPUs of this machine with the run.
- All other settings are the defaults of a run.
"""


def page(rows: Sequence[Row], machines: Mapping[str, str], concurrency: int) -> str:
    """Return the documentation page; ``machines`` describes where each environment was measured."""
    said = dict.fromkeys(machines.values())
    lines = [f"{', '.join(id for id in machines if machines[id] == one)}: {one}." for one in said]
    return PAGE.format(machine="\n".join(f"- {line}" for line in lines), table=table(rows), concurrency=concurrency)
