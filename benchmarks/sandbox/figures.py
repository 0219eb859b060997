"""What was measured, beside what was promised: rows, their table, and the page of the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PAGE = """# Sandboxes in figures

Written by `python -m benchmarks.sandbox`{how}. One run, side by side, on a real Docker engine: the docker SDK's
`exec_run` in the same container, the engine's own create and start with the same hardening, and SWE-ReX by its own
Docker deployment and client, its server running in a container of the same image.

{machine}

{table}
Latencies are round trips as the caller sees them. `exec` is `Sandbox.exec(["true"])`; most of it is the program's own
start, which the machine sets. Memory of an agent is its proportional share (PSS) among sandboxes that run side by side,
for they share the interpreter's pages; what is resident (RSS) counts these once in each. A pool's sandboxes are
acquired while none are being made. Crashes are injected by `docker kill`, whose own time counts. What an environment's
step adds is the median of a step in a container less that of the same step in this process.
"""


@dataclass(frozen=True)
class Figure:
    """One measured value; ``target`` is what it must stay below, or with ``at_least`` what it must reach."""

    name: str
    value: float
    unit: str
    target: float | None = None
    kind: Literal["below", "at most", "at least"] = "below"

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        if self.kind == "at least":
            return self.value >= self.target
        return self.value < self.target or (self.kind == "at most" and self.value == self.target)

    @property
    def wanted(self) -> str:
        sign = {"below": "<", "at most": "≤", "at least": "≥"}[self.kind]
        return "" if self.target is None else f"{sign} {self.target:,g} {self.unit}".strip()


def p(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of them do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)] if percent != 50 else statistics.median(values)


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    rows = [("figure", "value", "target", "met"), ("---", "---", "---", "---")]
    for figure in figures:
        value = f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
        met = {None: "", True: "yes", False: "**no**"}[figure.met]
        rows.append((figure.name, f"{value} {figure.unit}".strip(), figure.wanted, met))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def page(figures: Sequence[Figure], machine: str, how: str = "") -> str:
    return PAGE.format(how=how, machine=machine, table=table(figures))
