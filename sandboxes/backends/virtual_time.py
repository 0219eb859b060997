"""An event loop whose time is made up: waiting takes no time, and the same program always takes the same course.

Invariant: time passes only when nothing else can be done, and then jumps to the next thing that is due. Code that has
its time from ``asyncio`` (``sleep``, ``wait_for``, ``loop.time()``) needs no change to be simulated; code that waits
for threads, sockets or ``time.sleep`` cannot be.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulationStuck(RuntimeError):
    """Nothing that could go on is left, or the simulated time is over: the program would wait for ever."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, moves the clock."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit = limit

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise SimulationStuck(f"at {self.now:.3f} s every task waits for something that nobody will do")
        self.now += max(timeout, 0.0)
        if self.now > self._limit:
            raise SimulationStuck(f"the simulation still runs after {self._limit:g} simulated seconds")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that begins at time 0 and never waits. ``limit`` is in simulated seconds."""

    def __init__(self, limit: float = 1e6) -> None:
        self._clock = _Jumping(limit)
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T], *, limit: float = 1e6) -> T:
    """Run ``main`` like ``asyncio.run``, in simulated time.

    Raises ``SimulationStuck`` if it would never end or takes more than ``limit`` simulated seconds.
    """
    loop = VirtualTimeLoop(limit)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            if tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
