"""The table and the plots of the learning benchmark.

Invariant: the rows and the plot of a setting come only from this run's results; without results for a setting, its
existing rows and plot are kept.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.learning.settings import SETTINGS

HEADER = (
    "| setting | async ratio | random | expert | imitated | after RL | gap closed | share of expert | s / run |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)

PAGE = """# Learning

`python -m benchmarks.learning` writes this page. Success rates are those on test tasks (for ALFWorld: on the games of
training): the mean, and the range over n seeds. `gap closed` is the share of the distance between imitation and the
expert's success.

{table}
Success in training, averaged over five steps:

{plots}
"""


def write_report(results: list[dict[str, Any]], directory: Path) -> str:
    """Write ``learning.md`` and a plot for each result into ``directory``; returns the table."""
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "learning.md"
    rows = _known_rows(page) | {result["title"]: _rows(result) for result in results}
    table = HEADER + "".join(row for setting in SETTINGS for row in rows.get(setting.title, ()))
    for result in results:
        _plot(result, directory / f"learning_{result['name']}.svg")
    plots = [f"![{s.title}](learning_{s.name}.svg)" for s in SETTINGS if s.title in rows]
    page.write_text(PAGE.format(table=table, plots="\n".join(plots)))
    return table


def _known_rows(page: Path) -> dict[str, list[str]]:
    """Return the existing rows of a page, by the setting in their first cell."""
    lines = page.read_text().splitlines(keepends=True) if page.exists() else []
    rows = {setting.title: [line for line in lines if line.startswith(f"| {setting.title} |")] for setting in SETTINGS}
    return {title: found for title, found in rows.items() if found}


def _rows(result: dict[str, Any]) -> list[str]:
    ratios = sorted({ratio for runs in result["seeds"].values() for ratio in runs}, key=float)
    return [_row(result, ratio) for ratio in ratios]


def _row(result: dict[str, Any], ratio: str) -> str:
    runs = [runs[ratio] for runs in result["seeds"].values() if ratio in runs]
    before, after = [run["before"] for run in runs], [run["after"] for run in runs]
    expert = result["expert"]
    closed = [(late - early) / (expert - early) for early, late in zip(before, after, strict=True)]
    share = [late / expert for late in after]
    cells = [
        result["title"],
        ratio,
        f"{result['random']:.1%}",
        f"{expert:.1%}",
        _spread(before),
        _spread(after),
        _spread(closed),
        _spread(share),
        f"{statistics.median(run['seconds'] for run in runs):.0f}",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _spread(values: list[float]) -> str:
    """Format the mean, and the range over seeds."""
    return f"{statistics.mean(values):.1%} ({min(values):.1%} – {max(values):.1%}, n={len(values)})"


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.4))
    for runs in result["seeds"].values():
        for ratio, run in runs.items():
            colour = "tab:blue" if float(ratio) == 0 else "tab:orange"
            axis.plot(_smooth(run["curve"]), color=colour, alpha=0.7, label=f"async ratio {ratio}")
    axis.axhline(result["expert"], color="tab:green", linestyle="--", label="expert")
    axis.axhline(result["random"], color="tab:gray", linestyle=":", label="random")
    axis.set(title=result["title"], xlabel="training step", ylabel="success in training", ylim=(0, 1.02))
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axis.legend(unique.values(), unique.keys(), fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _smooth(curve: list[float], window: int = 5) -> list[float]:
    return [statistics.mean(curve[max(0, k - window + 1) : k + 1]) for k in range(len(curve))]
