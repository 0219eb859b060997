"""Views of a run: a live view on a terminal, plain lines elsewhere.

Invariant: a view only displays; the run does not wait for it, and it restores the terminal. Markup and control
characters in texts of models, environments and settings have no effect. There is output at least every
``heartbeat.INTERVAL_S`` seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentkit import progress
from agentkit.cli.heartbeat import Heartbeat
from agentkit.config import RunConfig
from agentkit.progress import View, duration
from agentkit.text import printable

Metrics = Mapping[str, float]


def make_view() -> View:
    """Return a live view if standard output is a terminal, else plain lines."""
    return LiveView() if sys.stdout.isatty() else PlainView()


class Progression:
    """Number of finished steps, and an estimate of the remaining time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._first: tuple[int, float] | None = None
        self._last = 0.0

    def reached(self, step: int, now: float) -> None:
        # Count from the first step seen: a resumed run does not start at 0, and imitation has no steps.
        self.done, self._last = step, now
        self._first = self._first or (step, now)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the end; None before the second step."""
        if self._first is None or self.done == self._first[0]:
            return None
        step, began = self._first
        return (self._last - began) / (self.done - step) * (self.total - self.done)


class Totals:
    """Sums over the whole run of metrics that are counted per step."""

    def __init__(self) -> None:
        self.dropped = self.failures = self.recoveries = 0.0

    def add(self, metrics: Metrics) -> None:
        self.dropped += metrics.get("gate/dropped", 0.0)
        self.failures += metrics.get("env/failures", 0.0)
        self.recoveries += metrics.get("sandbox/recoveries", 0.0)


class PlainView:
    """Plain lines for logs: one per stage, message and step, and the work in progress in between."""

    def start(self, config: RunConfig) -> None:
        self._progression, self._totals, self._stage = Progression(config.steps), Totals(), ""
        self._heartbeat = Heartbeat(lambda text: print(text, flush=True), fallback="starting")
        self._heartbeat.start()
        self.message(f"{config.env.id}, {config.model.path}, {config.steps} steps → {config.dir}")
        self.message(f"page: agentkit dashboard {config.dir}")

    def stage(self, name: str) -> None:
        if name != self._stage:
            self._stage = self._heartbeat.fallback = name
            self.message(f"— {name}")

    def step(self, step: int, metrics: Metrics) -> None:
        self._progression.reached(step, time.monotonic())
        self._totals.add(metrics)
        parts = [f"{label} {text}" for label, text in figures(metrics, self._totals)]
        left = self._progression.seconds_left()
        parts.append(f"left {duration(left)}" if left is not None else "")
        self.message(f"step {step}/{self._progression.total}  " + "  ".join(part for part in parts if part))

    def message(self, text: str) -> None:
        print(printable(text), flush=True)
        self._heartbeat.spoke()

    def stop(self) -> None:
        self._heartbeat.stop()


class LiveView:
    """A progress bar, the work in progress and a table of the latest metrics; messages scroll above."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None

    def start(self, config: RunConfig) -> None:
        self._progression, self._totals = Progression(config.steps), Totals()
        self._figures: list[tuple[str, str]] = []
        self._bar = Progress(
            TextColumn("{task.description:<10}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("steps ·"),
            TimeElapsedColumn(),
            TextColumn("· left {task.fields[left]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=config.steps, left="–")
        title = printable(f" · {config.model.path} · {config.dir}")
        self._console.print(Text.assemble((printable(config.env.id), "bold"), title))
        self._console.print(Text(printable(f"page: agentkit dashboard {config.dir}"), style="dim"))
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        self._live.start()

    def stage(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def step(self, step: int, metrics: Metrics) -> None:
        self._progression.reached(step, time.monotonic())
        self._totals.add(metrics)
        self._figures = figures(metrics, self._totals)
        left = self._progression.seconds_left()
        self._bar.update(self._task, completed=step, left="–" if left is None else duration(left))

    def message(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Group:
        shown: list[RenderableType] = [self._bar]
        if under_way := progress.describe():
            shown.append(Text(printable(under_way), style="dim", no_wrap=True, overflow="ellipsis"))
        table = Table.grid(padding=(0, 3))
        for start in range(0, len(self._figures), 5):
            some = self._figures[start : start + 5]
            table.add_row(*(Text.assemble((label, "dim"), f" {text}") for label, text in some))
        return Group(*shown, table) if self._figures else Group(*shown)


def figures(metrics: Metrics, totals: Totals) -> list[tuple[str, str]]:
    """Return label and text of the metrics to display, if present."""
    shown = []

    def add(label: str, key: str, form: str) -> None:
        if key in metrics:
            shown.append((label, form.format(metrics[key])))

    add("success", "rollout/success", "{:.1%}")
    add("return", "rollout/return_mean", "{:.3f}")
    add("turns", "rollout/turns_mean", "{:.1f}")
    add("tokens/s", "engine/tokens_per_s", "{:,.0f}")
    if "staleness/mean" in metrics:
        shown.append(("staleness", f"{metrics['staleness/mean']:.2f} (max {metrics.get('staleness/max', 0):.0f})"))
    shown.append(("dropped", f"{totals.dropped:.0f}"))
    shown.append(("failures", f"{totals.failures:.0f}"))
    if "sandbox/busy" in metrics:
        shown.append(("sandboxes", f"{metrics['sandbox/busy']:.0f} ({totals.recoveries:.0f} recoveries)"))
    add("loss", "policy/loss", "{:.4f}")
    add("entropy", "policy/entropy", "{:.3f}")
    add("step", "time/step", "{:.1f} s")
    return shown
