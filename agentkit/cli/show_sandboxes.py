"""`agentkit show RUN --sandboxes`: what failed, and what it cost."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentkit.text import printable

Record = Mapping[str, Any]

_HEADER = ("time", "host", "sandbox", "what happened", "episodes recovered", "seconds")


def sandbox_lines(metrics: Iterable[Record], events: Iterable[Record], last: int) -> list[str]:
    """Return totals over all steps, then the last events.

    Args:
        metrics: lines of ``metrics.jsonl``.
        events: lines of ``events.jsonl``.
        last: number of events.
    """
    steps = [step for step in metrics if "sandbox/created" in step]
    rows = event_rows(events)
    if not steps and not rows:
        return ["this run has had no sandboxes, or has not finished a training step"]
    return [*_totals(steps), "", *_table([_HEADER, *rows[-last:]])] if rows else [*_totals(steps), "", "no failures"]


def event_rows(events: Iterable[Record]) -> list[tuple[str, ...]]:
    """Return one row for each failed sandbox, with its recoveries, and for each other event."""
    rows: list[tuple[str, ...]] = []
    episodes: dict[str, Counter[str]] = {}
    seconds: dict[str, float] = {}
    known: dict[str, int] = {}
    """Index of the row of each sandbox."""
    for event in events:
        kind, when = event.get("event"), _time(event)
        if kind in ("sandbox_lost", "sandbox_recovered"):
            id = str(event.get("sandbox"))
            if kind == "sandbox_recovered":
                episodes.setdefault(id, Counter())[str(event.get("by"))] += int(event.get("episodes", 0))
                seconds[id] = max(seconds.get(id, 0.0), float(event.get("seconds", 0.0)))
            else:
                episodes.setdefault(id, Counter())
            recovered = ", ".join(f"{number} by {means}" for means, number in episodes[id].items())
            longest = f"{seconds[id]:.2f}" if id in seconds else ""
            idle = " while idle" if event.get("in_use") is False else ""
            row = (when, str(event.get("host")), id, f"{event.get('cause')}{idle}", recovered, longest)
            if id in known:
                first = rows[known[id]]
                rows[known[id]] = (*first[:4], *row[4:])
            else:
                known[id] = len(rows)
                rows.append(row)
        elif kind == "sandbox_host":
            change = f"{event.get('before')} → {event.get('state')}: {event.get('reason')}".removesuffix(": ")
            rows.append((when, str(event.get("host")), "", change, "", ""))
        elif kind == "sandbox_not_created":
            rows.append((when, "", "", f"not created: {event.get('error')}", "", ""))
        elif kind == "sandbox_events_omitted":
            number = sum(value for value in event.values() if isinstance(value, int))
            rows.append((when, "", "", f"{number} events were too many to record", "", ""))
    return rows


def _totals(steps: Sequence[Record]) -> list[str]:
    total: Counter[str] = Counter()
    for step in steps:
        for name, value in step.items():
            if name.startswith("sandbox/") and value is not None:
                total[name] += value
    longest = max((step.get("sandbox/recovery_s_max") or 0.0 for step in steps), default=0.0)
    lines = [
        f"{total['sandbox/created']:.0f} sandboxes created, {total['sandbox/create_failures']:.0f} not created, "
        f"{total['sandbox/removed']:.0f} removed{_parts(total, 'because of', 'sandbox/removed/')}",
        f"{total['sandbox/recoveries']:.0f} environments recovered"
        f"{_parts(total, 'after', 'sandbox/recoveries/')}{_parts(total, 'by', 'sandbox/recovered_by/')}",
        f"{total['sandbox/lost_s']:.1f} s lost to recoveries, the longest took {longest:.2f} s; "
        f"{total['sandbox/hedges']:.0f} calls hedged, {total['sandbox/hedges_won']:.0f} won by the second attempt",
    ]
    return [printable(line) for line in lines]


def _parts(total: Mapping[str, float], label: str, prefix: str) -> str:
    parts = [f"{name[len(prefix) :]} {value:.0f}" for name, value in sorted(total.items()) if name.startswith(prefix)]
    return f"; {label}: {', '.join(parts)}" if parts else ""


def _time(event: Record) -> str:
    return datetime.datetime.fromtimestamp(float(event.get("time", 0.0))).strftime("%Y-%m-%d %H:%M:%S")


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    cells = [[printable(cell).replace("\n", " ") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
