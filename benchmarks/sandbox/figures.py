"""What was measured, beside what was promised: rows, their table, and the page of the documentation."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

PAGE = """# Sandboxes in figures

Written by `python -m benchmarks.sandbox`: one run, side by side, on a real Docker engine, with the docker SDK's
`exec_run` in the same container, with the engine's own create and start of the same container without an agent, and
with SWE-ReX: its own client and Docker deployment, its server in a container of the same image.

{machine}

{table}
Times are round trips as the caller sees them. `exec` is `Sandbox.exec(["true"])`; most of it is the start of the
program itself. Agents share the pages of their interpreter: PSS counts these once for all sandboxes of an image, RSS
once in each. Sandboxes are taken from a pool while it makes none. Crashes are made by `docker kill`, whose own time
counts. A recovery has ended when the next command has run. What the machine has less memory means little while other
programs run.
"""


@dataclass(frozen=True)
class Figure:
    """One measured value; ``target`` is what it must stay below or, with ``at least``, what it must reach."""

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
    """The smallest of them that ``percent`` do not exceed."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


async def timed(work: Awaitable[Any]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - begin)


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    lines = ["| figure | value | target | met |", "|---|---|---|---|"]
    for figure in figures:
        value = f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
        target = "" if figure.target is None else f"{figure.kind} {figure.target:,g} {figure.unit}"
        met = {None: "", True: "yes", False: "**no**"}[figure.met]
        lines.append(f"| {figure.name} | {value} {figure.unit} | {target} | {met} |")
    return "\n".join(lines) + "\n"
