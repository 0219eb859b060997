"""The table and the plots of the off-policy benchmark.

Invariant: a run is compared only with the synchronous run of the same loss and seed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

HEADER = (
    "| loss | async ratio | staleness | success | against synchronous | ESS | ESS / synchronous | KL(μ ‖ π) "
    "| KL / synchronous |\n|---|---|---|---|---|---|---|---|---|\n"
)
PAGE = """# Losses on stale data

`python -m benchmarks.offpolicy` writes this page. All runs start from one imitated model and train on FrozenLake with
two optimiser steps per batch; only the loss (with the advantage, clips and caps that it brings), the async ratio and
the seed differ. Success is measured by sampling on 256 test tasks after training; the imitated model reaches
{before:.1%}. Effective sample size (ESS) of the weights `π/μ` and `KL(μ ‖ π)` are means over all training steps.
Ranges are over n seeds; differences and ratios are between runs of the same seed.

{table}
![Success by loss at async ratio 0 and 2](offpolicy_losses.svg)
![Success, ESS and KL over the async ratio](offpolicy_sweep.svg)
"""


@dataclass(frozen=True)
class Result:
    """One run: success before and after training, and means over its training steps."""

    loss: str
    seed: int
    ratio: int
    before: float
    after: float
    ess: float
    kl: float
    staleness: float
    curve: list[float]
    """Success in training, by step."""


def write_report(results: list[Result], directory: Path) -> str:
    """Write ``offpolicy.md`` and its plots into ``directory``; returns the table."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = table(results)
    page = PAGE.format(table=rows, before=mean(result.before for result in results))
    (directory / "offpolicy.md").write_text(page)
    _plot_losses(results, directory / "offpolicy_losses.svg")
    _plot_sweep(results, directory / "offpolicy_sweep.svg")
    return rows


def table(results: list[Result]) -> str:
    """One row for each loss and async ratio."""
    cases = sorted({(result.loss, result.ratio) for result in results})
    return HEADER + "".join(_row(loss, ratio, results) for loss, ratio in cases)


def _row(loss: str, ratio: int, results: list[Result]) -> str:
    runs = _runs(results, loss, ratio)
    synchronous = {run.seed: run for run in _runs(results, loss, 0)}
    pairs = [(run, synchronous[run.seed]) for run in runs if ratio > 0 and run.seed in synchronous]
    cells = [
        f"`{loss}`",
        str(ratio),
        f"{mean(run.staleness for run in runs):.2f}",
        _spread((run.after for run in runs), "{:.1%}"),
        _spread((100 * (run.after - sync.after) for run, sync in pairs), "{:+.1f}", " points"),
        _spread((run.ess for run in runs), "{:.3f}"),
        _spread((run.ess / sync.ess for run, sync in pairs), "{:.2f}"),
        _spread((run.kl for run in runs), "{:.4f}"),
        _spread((run.kl / sync.kl for run, sync in pairs if sync.kl > 0), "{:.1f}"),
    ]
    return "| " + " | ".join(cells) + " |\n"


def _runs(results: list[Result], loss: str, ratio: int) -> list[Result]:
    return sorted((r for r in results if (r.loss, r.ratio) == (loss, ratio)), key=lambda r: r.seed)


def _spread(values: Iterable[float], form: str, unit: str = "") -> str:
    """Format the mean, and the range over seeds."""
    values = list(values)
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return f"{form.format(mean(values))}{unit} ({low} – {high}, n={len(values)})"


def _plot_losses(results: list[Result], path: Path) -> None:
    pyplot = _pyplot()
    losses = sorted({result.loss for result in results})
    figure, axis = pyplot.subplots(figsize=(7, 3.6))
    for offset, ratio, colour in ((-0.12, 0, "tab:blue"), (0.12, 2, "tab:orange")):
        for position, loss in enumerate(losses):
            after = [run.after for run in _runs(results, loss, ratio)]
            label = f"async ratio {ratio}" if position == 0 else None
            axis.plot([position + offset] * len(after), after, "o", color=colour, alpha=0.7, markersize=4, label=label)
    axis.axhline(mean(result.before for result in results), color="tab:gray", linestyle=":", label="imitated")
    axis.set_xticks(range(len(losses)), losses, rotation=60, ha="right", fontsize=7)
    axis.set(ylabel="success on test tasks", ylim=(0, 1.02))
    axis.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _plot_sweep(results: list[Result], path: Path) -> None:
    pyplot = _pyplot()
    swept = sorted({result.loss for result in results if result.ratio not in (0, 2)})
    figure, axes = pyplot.subplots(1, 3, figsize=(9, 3))
    for axis, name, title in zip(axes, ("after", "ess", "kl"), ("success", "ESS", "KL(μ ‖ π)"), strict=True):
        for loss in swept:
            ratios = sorted({result.ratio for result in results if result.loss == loss})
            values = [[getattr(run, name) for run in _runs(results, loss, ratio)] for ratio in ratios]
            (line,) = axis.plot(ratios, [mean(each) for each in values], marker="o", markersize=3, label=loss)
            axis.fill_between(ratios, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2)
        axis.set(title=title, xlabel="async ratio")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot
