"""The page about SmolLM2: its table, its transcripts and its plot.

Invariant: intervals are over questions, because answers to the same question are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.algorithms.report import interval
from benchmarks.smollm2.methods import METHODS
from benchmarks.smollm2.results import Answer, Result

PAGE = """# SmolLM2

`python -m benchmarks.smollm2` writes this page. `examples/smollm2.yaml` trains SmolLM2-135M-Instruct, a pretrained
model, on sums and differences of numbers up to 20, by reinforcement alone: no imitation, no examples of answers, a
reward of 1 for the correct number. It is evaluated by sampling 256 answers (temperature 1) to {questions} questions
that training never asks.

{table}

Success is the mean over n seeds with its 95 % interval (bootstrap over questions, all seeds together). *Correct of
numbers* counts only answers that contain a number, so a gain there is not one of format. *Minus GRPO* compares runs of
the same seed (points, 95 % interval of Student's t over the seeds). Minutes are the wall time of all training steps,
on two cores that other work shared. Memory is the peak of the run's largest process.

![Success in training by method, averaged over five steps](smollm2.svg)

## Answers before and after

The first answer to some test questions, before and after training (GRPO, seed {seed}); ✓ marks correct answers:

| question | before | after |
|---|---|---|
{transcripts}
"""


def write_report(results: list[Result], directory: Path) -> str:
    """Write ``smollm2.md`` and its plot into ``directory``; return the table."""
    made = table(results)
    shown = next(result for result in results if result.method == "grpo")
    questions = len({answer.question for answer in shown.before})
    page = PAGE.format(questions=questions, table=made, seed=shown.seed, transcripts=transcripts(shown, 12))
    (directory / "smollm2.md").write_text(page)
    _plot(results, directory / "smollm2.svg")
    return made


def table(results: Sequence[Result]) -> str:
    """Return one row for each method that was run."""
    titles = [
        "method",
        "n",
        "success before",
        "success after",
        "minus GRPO, points",
        "with a number",
        "correct of numbers",
    ]
    titles += ["s / step", "minutes", "memory, GB"]
    rows = [titles, ["---"] * len(titles)]
    base = {result.seed: result for result in results if result.method == "grpo"}
    for name, method in METHODS.items():
        chosen = [result for result in results if result.method == name]
        if not chosen:
            continue
        before = [answer for result in chosen for answer in result.before]
        after = [answer for result in chosen for answer in result.after]
        pairs = [(result, base[result.seed]) for result in chosen if result.seed in base and name != "grpo"]
        differences = [100 * (success(one.after) - success(other.after)) for one, other in pairs]
        rows.append(
            [
                method.title,
                str(len(chosen)),
                _with_interval(before),
                _with_interval(after),
                interval(differences),
                " → ".join(f"{_with_number(answers):.0%}" for answers in (before, after)),
                " → ".join(f"{_correct_of_numbers(answers):.0%}" for answers in (before, after)),
                f"{mean(result.step_s for result in chosen):.1f}",
                f"{mean(result.minutes for result in chosen):.0f}",
                f"{max(result.peak_bytes for result in chosen) / 1e9:.1f}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def success(answers: Sequence[Answer]) -> float:
    return mean(answer.correct for answer in answers)


def bootstrap(answers: Sequence[Answer], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the success, by drawing questions with all of their answers."""
    questions: dict[str, list[bool]] = {}
    for answer in answers:
        questions.setdefault(answer.question, []).append(answer.correct)
    right = np.array([sum(each) for each in questions.values()])
    count = np.array([len(each) for each in questions.values()])
    drawn = np.random.default_rng(0).integers(len(right), size=(draws, len(right)))
    low, high = np.quantile(right[drawn].sum(axis=1) / count[drawn].sum(axis=1), [0.025, 0.975])
    return float(low), float(high)


def transcripts(result: Result, count: int) -> str:
    """Return table rows with the first answers to the first questions that both evaluations asked."""
    before, after = ({answer.question: answer for answer in reversed(each)} for each in (result.before, result.after))
    asked = dict.fromkeys(answer.question for answer in result.before if answer.question in after)
    return "\n".join(
        f"| {question} | {_shown(before[question])} | {_shown(after[question])} |" for question in list(asked)[:count]
    )


def _shown(answer: Answer) -> str:
    text = " ".join(answer.text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{text}`{' ✓' if answer.correct else ''}"


def _with_interval(answers: Sequence[Answer]) -> str:
    low, high = bootstrap(answers)
    return f"{success(answers):.1%} ({low:.1%} to {high:.1%})"


def _with_number(answers: Sequence[Answer]) -> float:
    return mean(answer.has_number for answer in answers)


def _correct_of_numbers(answers: Sequence[Answer]) -> float:
    numbers = [answer.correct for answer in answers if answer.has_number]
    return mean(numbers) if numbers else 0.0


def _plot(results: Sequence[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    for number, (name, method) in enumerate(METHODS.items()):
        curves = [result.curve for result in results if result.method == name]
        if not curves:
            continue  # not run
        smooth = [[mean(curve[max(0, k - 4) : k + 1]) for k in range(len(curve))] for curve in curves]
        for curve in smooth:
            axis.plot(curve, color=f"C{number}", alpha=0.3, linewidth=0.8)
        average = [mean(column) for column in zip(*smooth, strict=False)]
        axis.plot(average, color=f"C{number}", label=method.title)
    axis.set(xlabel="training step", ylabel="success in training", ylim=(0, 1.02))
    axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
