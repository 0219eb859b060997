"""Probe the agent of a sandbox while something waits for the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from agentkit.sandboxes.liveness import PERIOD


class Watchdog:
    """Periodic probes of one sandbox, shared by all that wait for it.

    Args:
        probe: called every ``PERIOD`` seconds; declares the sandbox lost if the agent is silent. Must not raise.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        self._probe = probe
        self._waiting = 0
        self._pending: asyncio.TimerHandle | asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Probe while the body runs, from ``PERIOD`` seconds on: short commands cause no probe."""
        self._waiting += 1
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(PERIOD, self._start)
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and self._pending is not None:
                self._pending.cancel()
                self._pending = None

    def _start(self) -> None:
        self._pending = asyncio.ensure_future(self._probe_forever())

    async def _probe_forever(self) -> None:
        while True:
            await self._probe()
            await asyncio.sleep(PERIOD)
