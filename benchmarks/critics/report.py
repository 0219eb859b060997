"""The table and the plot of the comparison of critics.

Invariant: a run is compared only with the PPO run of the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

BASELINE = "ppo"
HEADER = (
    "| method | success | minus PPO | explained variance | s / step ÷ PPO | s of training ÷ PPO | peak memory ÷ PPO "
    "| models and optimisers ÷ PPO |\n|---|---|---|---|---|---|---|---|\n"
)
PAGE = """# Critics

`python -m benchmarks.critics` writes this page. All runs start from one imitated model (success {before:.1%}) and train
on FrozenLake with the same tasks, episodes per step and steps; critics train alone in the first 8 of {steps} steps.
PPO has one critic of the policy's size, which starts from the policy's weights. AsyPPO has two fresh critics of two
layers of width 64. Success is measured by sampling on 256 test tasks after training.

Ranges are over n seeds; differences and ratios are between runs of the same seed. Peak memory is that of the run's
process, with torch and the inference engine; the bytes of models and optimisers are what `agentkit plan` counts for the
learner between two steps.

{table}
Success in training, averaged over five steps:

![Success in training by method](critics.svg)
"""


@dataclass(frozen=True)
class Result:
    """One run."""

    method: str
    seed: int
    before: float
    """Success on test tasks."""
    after: float
    step_s: float
    """Median seconds per training step."""
    train_s: float
    """Median seconds per training step that the learner took."""
    peak_bytes: int
    held_bytes: int
    """Of the learner's models and optimisers, as planned."""
    explained_variance: float | None
    """Of the (mean) critic, in the last step."""
    curve: list[float]
    """Success in training, by step."""


def write_report(results: list[Result], directory: Path) -> str:
    """Write ``critics.md`` and its plot into ``directory``; returns the table."""
    made = table(results)
    steps = max(len(result.curve) for result in results)
    page = PAGE.format(before=mean(result.before for result in results), steps=steps, table=made)
    (directory / "critics.md").write_text(page)
    _plot(results, directory / "critics.svg")
    return made


def table(results: list[Result]) -> str:
    """Return one row per method, in the order of their success."""
    methods = {result.method: [each for each in results if each.method == result.method] for result in results}
    order = sorted(methods, key=lambda method: -mean(result.after for result in methods[method]))
    return HEADER + "".join(_row(method, methods[method], methods.get(BASELINE, [])) for method in order)


def _row(method: str, results: list[Result], baseline: list[Result]) -> str:
    base = {result.seed: result for result in baseline}
    pairs = [(result, base[result.seed]) for result in results if result.seed in base]

    def ratio(of: Callable[[Result], float]) -> str:
        return _spread([of(one) / of(other) for one, other in pairs], "{:.2f}")

    explained = [result.explained_variance for result in results if result.explained_variance is not None]
    cells = [
        method.replace("_", " "),
        _spread([result.after for result in results], "{:.1%}"),
        _spread([one.after - other.after for one, other in pairs], "{:+.1%}"),
        _spread(explained, "{:.2f}"),
        ratio(lambda result: result.step_s),
        ratio(lambda result: result.train_s),
        ratio(lambda result: result.peak_bytes),
        ratio(lambda result: result.held_bytes),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _spread(values: list[float], form: str) -> str:
    """Format the mean, and the range over seeds."""
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(mean(values))} ({low} to {high}, n={len(values)})"


def _plot(results: list[Result], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6))
    for number, method in enumerate(dict.fromkeys(result.method for result in results)):
        curves = [result.curve for result in results if result.method == method]
        average = [mean(column) for column in zip(*curves, strict=False)]
        smooth = [mean(average[max(0, k - 4) : k + 1]) for k in range(len(average))]
        axis.plot(smooth, color=f"C{number}", label=method.replace("_", " "))
    axis.set(xlabel="training step", ylabel="success in training", ylim=(0, 1.02))
    axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
