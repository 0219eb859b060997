"""Close a sandbox when its time to live ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentkit.errors import SandboxError

_log = logging.getLogger(__name__)

_MAX_RETRY_DELAY = 60.0


class Expiry:
    """The time to live of one sandbox, by the clock of the event loop.

    Args:
        id: name of the sandbox, for the log.
        close: removes the sandbox; called when the time ends, and again until it succeeds.
    """

    def __init__(self, id: str, close: Callable[[], Awaitable[None]]) -> None:
        self._id = id
        self._close = close
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.expired = False

    @property
    def at(self) -> float | None:
        """When the time ends, by the clock of the event loop; None without an end."""
        return None if self._timer is None else self._timer.when()

    def set(self, ttl: float | None) -> None:
        """Let the time end in ``ttl`` seconds from now, or never."""
        self.stop()
        if ttl is not None:
            self._timer = asyncio.get_running_loop().call_later(ttl, self._expire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self.expired = True
        self._task = asyncio.ensure_future(self._close_until_done())

    async def _close_until_done(self) -> None:
        delay = 1.0
        while True:
            try:
                await self._close()
                return
            except SandboxError as error:
                _log.warning("sandbox %s has expired and could not be removed: %s", self._id, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_RETRY_DELAY)
