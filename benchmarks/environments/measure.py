"""Measure one row of the table in a separate process: the times of given episodes, and the memory of the players.

Invariant: imports only the standard library until players are created, so any Python that has another implementation
can run this module.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.environments import players

Script = tuple[Any, list[Any]]
"""A task (a seed, or what a rival takes for one), and the actions of its episode."""


def play(those: Any, count: int, scripts: Sequence[Script], episodes: int, seconds: float) -> dict[str, Any]:
    """Play ``episodes`` episodes with ``count`` players, at most for ``seconds``; return times in seconds, and counts.

    One-time work (start of processes and containers, reading of files) is timed separately as ``start``.
    """
    resets: list[float] = []
    steps: list[float] = []
    source, due = cycle(scripts), list(range(count))
    taken = ended = solved = failures = 0
    left: list[list[Any]] = [[] for _ in due]
    begin = time.perf_counter()
    task, actions = scripts[-1]
    with contextlib.suppress(players.Failed):  # it fails again, and counts then
        those.reset(due, [task] * count)
        for action in actions:
            over, _, broken = those.step([action] * count)
            failures += sum(map(bool, broken))
            if any(over):
                break
    start_s, begin = time.perf_counter() - begin, time.perf_counter()
    most = episodes + failures
    while ended + failures < most and time.perf_counter() - begin < seconds:
        if due:
            drawn = [next(source) for _ in due]
            start = time.perf_counter()
            try:
                those.reset(due, [task for task, _ in drawn])
            except players.Failed as error:
                print(error, file=sys.stderr)
                failures += 1
                continue
            resets.append(time.perf_counter() - start)
            for k, (_, actions) in zip(due, drawn, strict=True):
                left[k] = actions[::-1]
        start = time.perf_counter()
        over, won, broken = those.step([actions.pop() for actions in left])
        steps.append(time.perf_counter() - start)
        taken += count
        due = [k for k in range(count) if over[k] or not left[k]]
        failures += sum(map(bool, broken))
        ended += sum(not broken[k] for k in due)
        solved += sum(bool(won[k]) for k in due)
    return {
        "seconds": time.perf_counter() - begin, "taken": taken, "ended": ended, "solved": solved,
        "failures": failures, "resets": resets, "steps": steps, "start": start_s,
    }  # fmt: skip


def proportional(roots: Iterable[int]) -> int:
    """Return the bytes (PSS) of processes and their descendants; shared pages are divided among the processes."""
    total, todo = 0, list(roots)
    while todo:
        process = Path("/proc", str(todo.pop()))
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split()[:2] for line in (process / "smaps_rollup").read_text().splitlines()[1:])
            total += int(fields["Pss:"]) << 10
            for thread in (process / "task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
    return total


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Play half of the episodes with one player, half with several; return times, and bytes for each further player."""
    count, half = order["instances"], ((order["episodes"] + 1) // 2, order["seconds"])
    one = players.make(1, **order["players"])
    try:
        alone = play(one, 1, order["scripts"], *half)
        gc.collect()
        before = proportional({os.getpid(), *one.elsewhere()})
        several = players.make(count, **order["players"])
        try:
            together = play(several, count, order["scripts"], *half)
            gc.collect()
            after = proportional({os.getpid(), *several.elsewhere()})
        finally:
            several.close()
    finally:
        one.close()
    return {"alone": alone, "together": together, "bytes": (after - before) / count}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # rivals print, too
        found = measure(json.load(sys.stdin))
    json.dump(found, sys.stdout)
