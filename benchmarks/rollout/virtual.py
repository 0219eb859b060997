"""Event loop whose clock jumps to the next timer instead of waiting: real schedulers, simulated waits, no noise.

On the ``virtual`` clock computing takes no time, so the ratio to the bound depends only on the scheduler's decisions.
On the ``cpu`` clock the CPU time of the process is added to the jumps: the time that the same run would take on a
dedicated core, independent of other load.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing is scheduled: the simulation is stuck")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop for coroutines that wait only for timers."""

    def __init__(self, *, charge_cpu: bool) -> None:
        self._jumping = _JumpingSelector()
        self._spent = time.process_time if charge_cpu else lambda: 0.0
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now + self._spent()


def run_virtual(work: Coroutine[Any, Any, T], *, charge_cpu: bool = False) -> T:
    """``asyncio.run`` on a jumping clock."""
    loop = VirtualLoop(charge_cpu=charge_cpu)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def run_charged(work: Coroutine[Any, Any, T]) -> T:
    """``run_virtual`` on the ``cpu`` clock."""
    return run_virtual(work, charge_cpu=True)
