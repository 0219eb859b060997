"""The evaluations that the runs recorded, answer by answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agentkit.records import EVALUATION, iterate_trajectories
from benchmarks.learning.runs import metrics


@dataclass(frozen=True)
class Answer:
    """One answer to a test question."""

    question: str
    text: str
    has_number: bool
    correct: bool


@dataclass(frozen=True)
class Result:
    """One run."""

    method: str
    seed: int
    before: list[Answer]
    after: list[Answer]
    evaluations: dict[int, float]
    """Success on test questions by step."""
    curve: list[float]
    """Success in training by step."""
    minutes: float
    """Wall time of all steps."""
    step_s: float
    """Median seconds of a step."""
    peak_bytes: int


def collect(root: Path) -> list[Result]:
    """Return one result for each run that is done."""
    return [_result(path.parent) for path in sorted(root.glob("*-[0-9]*/peak"))]


def _result(directory: Path) -> Result:
    method, seed = directory.name.rsplit("-", 1)
    lines = metrics(directory)
    seconds = [line["time/step"] for line in lines if "time/step" in line]
    answers: dict[int, list[Answer]] = {}
    for row, trajectory in iterate_trajectories(directory / "episodes.sqlite", ending=EVALUATION):
        turn = trajectory.turns[0]
        answer = Answer(turn.observation, turn.response, bool(turn.actions), trajectory.success)
        answers.setdefault(row.step, []).append(answer)
    return Result(
        method,
        int(seed),
        before=answers[min(answers)],
        after=answers[max(answers)],
        evaluations={line["step"]: line["eval/success"] for line in lines if "eval/success" in line},
        curve=[line["rollout/success"] for line in lines if "rollout/success" in line],
        minutes=sum(seconds) / 60,
        step_s=median(seconds),
        peak_bytes=int((directory / "peak").read_text()),
    )
