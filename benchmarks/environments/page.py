"""Figures, tables and the documentation page of the environment benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.sandbox.figures import p

PAGE = """# Environment measurements

`python -m benchmarks.environments` writes this page. One run measures agentkit side by side with Gymnasium's
FrozenLake, with gym-sokoban, and with TextWorld on the games of ALFWorld. These three run in the process that plays
them.

{machine}. At most {episodes} episodes per row, and {seconds:g} seconds for each half of them.

{table}
One instance plays half of the episodes, and its calls are timed. {instances} instances (SWEBench-v0: two) play the
other half in lock-step. They give the steps per second, including resets, and the memory that each instance adds to
the first one (PSS of all processes and containers). An untimed episode comes first. agentkit's environments play the
expert's actions, the same episodes in every place; `solved` confirms this. A failure is a call that raised or hung.
Ratios are of medians, relative to the first row of an environment, which is another implementation if there is one.

Every episode has its own task, up to a hundred; this also applies to the other implementations: a new map in
Gymnasium's, a new 6×6 room with one box in gym-sokoban, observed as an image with one pixel per cell. These two move
at random; TextWorld plays the expert's actions. `in-process` is `agentkit.make`; the other rows use
`agentkit.make_vec`, whose calls go through an event loop. In Docker, environments that declare `inline` share a
sandbox, up to 64 of them; AlfWorld-v0 has one for each. Countdown-v0, Math-v0 and CodeContest-v0 take one step per
episode. Math-v0 receives answers in another notation than the known ones, so that they are compared by computation.
CodeContest-v0 and SWEBench-v0 hold hidden tests: they stay outside, and the tested programs run in sandboxes.
"""
_COLUMNS = (
    "environment", "where", "steps/s", "reset p50 ms", "p95", "step p50 ms", "p95", "MiB each", "episodes", "solved",
    "failures", "reset ÷ first", "step ÷ first",
)  # fmt: skip


def figures(found: dict[str, Any], instances: int) -> dict[str, Any]:
    """Return the result of ``measure`` as milliseconds, MiB and counts."""
    alone, together = found["alone"], found["together"]
    if not alone["resets"] or not together["resets"]:
        return {"error": f"no episode began; {alone['failures'] + together['failures']} failures"}
    times = {
        f"{call} p{percent} ms": 1e3 * p(alone[f"{call}s"], percent)
        for call in ("reset", "step")
        for percent in (50, 95)
    }
    counts = {name: alone[name] + together[name] for name in ("ended", "solved", "failures")}
    return {
        "steps/s": together["taken"] / together["seconds"], **times, **counts,
        "MiB each": found["bytes"] / 2**20, "instances": instances, "start s": together["start"],
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table, and below it the rows that could not be measured, with the reason."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    notes, firsts = [], {}
    for row in rows:
        if "error" in row:
            notes.append(f"- {row['id']} {row['where']}: not measured. {row['error']}")
            continue
        names = ("steps/s", "reset p50 ms", "reset p95 ms", "step p50 ms", "step p95 ms")
        first = firsts.setdefault(row["id"], row)
        ratios = [f"{row[n] / first[n]:.3g}" if first is not row else "" for n in ("reset p50 ms", "step p50 ms")]
        cells = [
            *(_number(row[n]) for n in names),
            "< 0.1" if row["MiB each"] < 0.1 else _number(row["MiB each"]),
            *(str(row[n]) for n in ("ended", "solved", "failures")),
            *ratios,
        ]
        lines.append(f"| {row['id']} | {row['where']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes]) + ("\n" if notes else "")


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per environment: medians in this process, in a worker process and in Docker, and failures."""
    lines = [
        "| Environment | `step`, ms | in a process | in Docker | `reset`, ms | in Docker | failures of episodes |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = [row for row in rows if "error" not in row and row["where"].startswith(("in-process", "process", "Docker"))]
    for id in dict.fromkeys(row["id"] for row in ours):
        here, process, docker = (
            next((row for row in ours if row["id"] == id and is_it(row["where"])), {}) for is_it in _PLACES
        )
        cells = [(here, "step"), (process, "step"), (docker, "step"), (here, "reset"), (docker, "reset")]
        times = [_number(row[f"{call} p50 ms"]) if row else "–" for row, call in cells]
        failures, ended = (sum(row[name] for row in ours if row["id"] == id) for name in ("failures", "ended"))
        lines.append(f"| {id} | " + " | ".join(times) + f" | {failures} of {ended + failures:,} |")
    return "\n".join(lines)


_PLACES = (
    lambda where: where.startswith("in-process") and "Docker" not in where,
    lambda where: where.startswith("process") and "Docker" not in where,
    lambda where: "Docker" in where,
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
