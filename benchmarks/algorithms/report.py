"""The tables and the plots of the comparison of algorithms.

Invariant: a run is compared only with the run of the baseline on the same task and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from benchmarks.algorithms.methods import COMPARISONS, TASKS, Comparison

PAGE = """# Algorithms

`python -m benchmarks.algorithms` writes this page. For each task, all runs start from one imitated model and train on
the same tasks with the same loss, episodes per step and number of steps. Success is measured by sampling on 256 test
tasks after training. PPO has one critic of the policy's size, which starts from the policy's weights. AsyPPO has two
fresh critics of two layers of width 64. Critics train alone in the first 8 steps. Local, global and coupled credit is
[attention-rhythm credit](../algorithms.md#attention-rhythm-credit) in addition to GRPO.

Success: the mean, and the range over n seeds. Differences and ratios are between runs of the same seed; differences
have the 95 % interval of Student's t over the seeds. Peak memory is that of the run's process, with torch and the
inference engine; the bytes of models and optimisers are what `agentkit plan` counts for the learner between two steps.

{tasks}"""
T_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t for the mean of so many values."""


@dataclass(frozen=True)
class Result:
    """One run."""

    task: str
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
    """Write ``algorithms.md`` and its plots into ``directory``; returns the tables."""
    for task in _tasks(results):
        for comparison in COMPARISONS:
            _plot(_chosen(results, task, comparison), directory / _plot_name(task, comparison))
    made = tables(results, plots=True)
    (directory / "algorithms.md").write_text(PAGE.format(tasks=made))
    return made


def tables(results: list[Result], *, plots: bool = False) -> str:
    """Return a section per task, with a table (and the name of the plot) per comparison."""
    sections = []
    for task in _tasks(results):
        before = mean(result.before for result in results if result.task == task)
        sections.append(f"## {TASKS[task]}\n\nImitated model: {before:.1%}.\n")
        for comparison in COMPARISONS:
            chosen = _chosen(results, task, comparison)
            if not chosen:
                continue
            sections.append(f"### {comparison.title}: {TASKS[task]}\n\n{_table(chosen, comparison)}")
            if plots:
                title = f"Success in training by method, averaged over five steps: {comparison.title}, {TASKS[task]}"
                sections.append(f"![{title}]({_plot_name(task, comparison)})\n")
    return "\n".join(sections)


def _tasks(results: list[Result]) -> list[str]:
    return [task for task in TASKS if any(result.task == task for result in results)]


def _chosen(results: list[Result], task: str, comparison: Comparison) -> list[Result]:
    return [result for result in results if result.task == task and result.method in comparison.methods]


def _plot_name(task: str, comparison: Comparison) -> str:
    return f"algorithms_{task}_{comparison.title.lower().replace(' ', '_')}.svg"


def _table(results: list[Result], comparison: Comparison) -> str:
    name = comparison.baseline.upper()
    titles = ["method", "success", f"minus {name}, points", "explained variance"]
    titles += [f"{quantity} ÷ {name}" for quantity in ("s / step", "s of training", "peak memory", "models")]
    header = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
    methods = {method: [each for each in results if each.method == method] for method in comparison.methods}
    order = sorted((m for m in methods if methods[m]), key=lambda method: -mean(one.after for one in methods[method]))
    return header + "".join(_row(method, methods[method], methods[comparison.baseline]) for method in order)


def _row(method: str, results: list[Result], baseline: list[Result]) -> str:
    base = {result.seed: result for result in baseline}
    pairs = [(result, base[result.seed]) for result in results if result.seed in base]

    def ratio(of: Callable[[Result], float]) -> str:
        return f"{mean(of(one) / of(other) for one, other in pairs):.2f}" if pairs else "–"

    after = [result.after for result in results]
    explained = [result.explained_variance for result in results if result.explained_variance is not None]
    is_baseline = any(one is other for one, other in pairs)
    cells = [
        method.replace("_", " "),
        f"{mean(after):.1%} ({min(after):.1%} to {max(after):.1%}, n={len(after)})",
        "–" if is_baseline else interval([100 * (one.after - other.after) for one, other in pairs]),
        f"{mean(explained):.2f}" if explained else "–",
        ratio(lambda result: result.step_s),
        ratio(lambda result: result.train_s),
        ratio(lambda result: result.peak_bytes),
        ratio(lambda result: result.held_bytes),
    ]
    return "| " + " | ".join(cells) + " |\n"


def interval(values: Sequence[float]) -> str:
    """Format the mean, and its 95 % interval by Student's t."""
    if not values:
        return "–"
    if len(values) not in T_QUANTILES:
        return f"{mean(values):+.1f}"
    half = T_QUANTILES[len(values)] * stdev(values) / sqrt(len(values))
    return f"{mean(values):+.1f} ({mean(values) - half:+.1f} to {mean(values) + half:+.1f})"


def _plot(results: list[Result], path: Path) -> None:
    if not results:
        return
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
