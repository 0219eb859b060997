"""Calls in progress of the clients of one tenant.

Invariant: when ``run`` returns or raises, its work has ended. A call that its client cancels ends, also if the
cancellation arrives first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentkit.errors import SandboxError
from agentkit.sandboxes.server.recent import Recent

T = TypeVar("T")

_CANCEL_SECONDS = 30.0
"""Seconds for which a cancellation waits for the end of its call."""


class Calls:
    """Calls by id. Attribute ``running``: the tasks of all calls in progress."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Task[Any]] = {}
        self._detached: set[str] = set()
        """Calls that continue without their clients."""
        self._cancelled = Recent()
        self._refusing = False

    async def run(self, call: str, work: Coroutine[Any, Any, T], disconnected: Coroutine[Any, Any, Any] | None) -> T:
        """Run ``work``, and cancel it when the client cancels ``call`` or disconnects.

        Args:
            call: the id of the call.
            work: the call.
            disconnected: ends when the client disconnects; None if ``work`` continues in that case.
        """
        if self._refusing or call in self._cancelled:
            work.close()
            if disconnected is not None:
                disconnected.close()
            raise SandboxError("the call was cancelled")
        task = self.running[call] = asyncio.ensure_future(work)
        if disconnected is None:
            self._detached.add(call)
        watch = None if disconnected is None else asyncio.ensure_future(disconnected)
        try:
            await asyncio.wait({task} if watch is None else {task, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if watch is not None:
                watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            del self.running[call]
            self._detached.discard(call)
        if task.cancelled():
            raise SandboxError("the call was cancelled")
        return task.result()

    async def cancel(self, call: str) -> None:
        """Cancel a call, which may arrive later, and return when it has ended."""
        self._cancelled[call] = ""
        if task := self.running.get(call):
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Wait until the calls in progress have ended, at most this long."""
        if self.running:
            await asyncio.wait({*self.running.values()}, timeout=seconds)

    def refuse(self) -> None:
        """Accept no more calls."""
        self._refusing = True

    def attached(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of the calls that do not continue without their clients."""
        return [task for call, task in self.running.items() if call not in self._detached]
