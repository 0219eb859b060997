"""One row of the table, measured by a process of its own: plays given episodes, and weighs what plays them.

Invariant: imports nothing but the standard library, so that any Python that has a rival can run it.

Episodes are played twice, half of them by one instance, which times ``reset`` and ``step``, and half by several at
once, which gives steps a second and memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

Script = tuple[Any, list[Any]]
"""A task (a seed, or what a rival takes for one), and the actions of its episode."""


class Failed(Exception):
    """A ``reset`` that failed."""


class Players(Protocol):
    """Several instances of one environment."""

    def reset(self, chosen: Sequence[int], tasks: Sequence[Any]) -> None:
        """Begin an episode in the chosen ones. Raises ``Failed``."""
        ...

    def step(self, actions: Sequence[Any]) -> tuple[Sequence[bool], Sequence[bool], Sequence[bool]]:
        """One action in each: whether it ended its episode, solved the task, and failed."""
        ...

    def close(self) -> None: ...


class Kind(Protocol):
    """A module with players."""

    def players(self, count: int, **arguments: Any) -> Players: ...

    def elsewhere(self) -> set[int]:
        """Processes that work for this one and that it did not start, such as an engine's."""
        ...


def play(players: Players, count: int, scripts: Sequence[Script], episodes: int, seconds: float) -> dict[str, Any]:
    """Play ``episodes`` of them, or for ``seconds``: times in seconds, and counts."""
    resets, steps, source = array("d"), array("d"), cycle(scripts)
    taken = ended = solved = failures = 0
    left: list[list[Any]] = [[] for _ in range(count)]
    due = list(range(count))
    begin = time.perf_counter()
    while ended + failures < episodes and time.perf_counter() - begin < seconds:
        if due:
            drawn = [next(source) for _ in due]
            start = time.perf_counter()
            try:
                players.reset(due, [task for task, _ in drawn])
            except Failed as error:
                print(error, file=sys.stderr)
                failures += 1
                continue
            resets.append(time.perf_counter() - start)
            for k, (_, actions) in zip(due, drawn, strict=True):
                left[k] = actions[::-1]
        start = time.perf_counter()
        over, won, broken = players.step([actions.pop() for actions in left])
        steps.append(time.perf_counter() - start)
        taken += count
        due = [k for k in range(count) if over[k] or not left[k]]
        failures += sum(map(bool, broken))
        ended += sum(not broken[k] for k in due)
        solved += sum(bool(won[k]) for k in due)
    return {
        "seconds": time.perf_counter() - begin, "taken": taken, "ended": ended, "solved": solved,
        "failures": failures, "resets": list(resets), "steps": list(steps),
    }  # fmt: skip


def proportional(roots: Iterable[int]) -> int:
    """Bytes (PSS) of processes and of all that they started; pages that processes share are divided among them."""
    total, todo = 0, list(roots)
    while todo:
        process = Path("/proc", str(todo.pop()))
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split()[:2] for line in (process / "smaps_rollup").read_text().splitlines()[1:])
            total += int(fields["Pss:"]) << 10
            for thread in (process / "task").iterdir():
                todo += map(int, (thread / "children").read_text().split())
    return total


def measure(kind: Kind, order: dict[str, Any]) -> dict[str, Any]:
    """What ``__main__.order`` asks for."""
    count, half, seconds = order["instances"], (order["episodes"] + 1) // 2, order["seconds"]
    one = kind.players(1, **order["arguments"])
    try:
        alone = play(one, 1, order["scripts"], half, seconds)
        gc.collect()
        before = proportional({os.getpid(), *kind.elsewhere()})
        several = kind.players(count, **order["arguments"])
        try:
            together = play(several, count, order["scripts"], half, seconds)
            gc.collect()
            after = proportional({os.getpid(), *kind.elsewhere()})
        finally:
            several.close()
    finally:
        one.close()
    return {"alone": alone, "together": together, "bytes": (after - before) / count}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # rivals print, too
        found = measure(importlib.import_module(sys.argv[1]), json.load(sys.stdin))  # pyright: ignore[reportArgumentType]
    json.dump(found, sys.stdout)
    sys.stdout.flush()
