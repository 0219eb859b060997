"""Measured values and their targets: rows, their table, and the documentation page."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

PAGE = """# Sandbox measurements

`python -m benchmarks.sandbox` writes this page. One run on a real Docker engine measures, side by side, agentkit, the
docker SDK's `exec_run` in the same container, the engine's create and start of the same container without an agent,
and SWE-ReX (its own client and Docker deployment, with its server in a container of the same image).

{machine}

{table}
Times are round trips as seen by the caller. `exec` is `Sandbox.exec(["true"])`; most of its time is the start of the
program itself. Agents share the pages of their interpreter: PSS counts them once for all sandboxes of an image, RSS
once in each sandbox. Sandboxes are acquired while the pool creates none. Crashes are caused by `docker kill`, and its
own time is included. A recovery lasts until the next command has run. The decrease of the machine's free memory is
unreliable while other programs run.
"""


@dataclass(frozen=True)
class Figure:
    """One measured value; ``kind`` is the comparison with ``target`` that must hold."""

    name: str
    value: float
    unit: str
    target: float | None = None
    kind: Literal["<", "≤", "≥"] = "<"

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return {"<": operator.lt, "≤": operator.le, "≥": operator.ge}[self.kind](self.value, self.target)


def p(values: Sequence[float], percent: float) -> float:
    """Return the percentile: the smallest value that ``percent`` of the values do not exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


async def timed(work: Awaitable[Any]) -> float:
    """Await ``work`` and return the milliseconds that it took."""
    begin = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begin)


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table."""
    lines = ["| figure | value | target | met |", "|---|---|---|---|"]
    for figure in figures:
        value = f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
        target = "" if figure.target is None else f"{figure.kind} {figure.target:,g} {figure.unit}"
        met = {None: "", True: "yes", False: "**no**"}[figure.met]
        lines.append(f"| {figure.name} | {value} {figure.unit} | {target} | {met} |")
    return "\n".join(lines) + "\n"
