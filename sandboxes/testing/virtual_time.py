"""An event loop with a virtual clock: waiting takes no time, and a program always takes the same course.

The clock advances only when no task can run, and then jumps to the next timer. Code that uses the time of ``asyncio``
(``sleep``, ``wait_for``, ``loop.time()``) runs unchanged. Code that waits for threads, sockets or ``time.sleep`` cannot
be simulated.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulationStuck(RuntimeError):
    """The program would never end: no task can run and no timer is set, or the time limit is reached."""


class _VirtualClock(selectors.DefaultSelector):
    """Advances the clock instead of waiting."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit = limit

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise SimulationStuck(f"at {self.now:.3f} s every task waits, and no timer is set")
        self.now += max(timeout, 0.0)
        if self.now > self._limit:
            raise SimulationStuck(f"the simulation still runs after {self._limit:g} simulated seconds")
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at time 0 and never waits. ``limit`` is in simulated seconds."""

    def __init__(self, limit: float = 1e6) -> None:
        self._clock = _VirtualClock(limit)
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
