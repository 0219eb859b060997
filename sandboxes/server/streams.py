"""Event streams from a sandbox server to its clients.

Invariant: a client gets all lines in order, or the stream ends: a client that has missed a line has to connect again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from agentkit.sandboxes.server.protocol import pack_json

_MAX_LINES = 1000
"""Lines that may wait for a client; the stream of a client that falls further behind ends."""


class EventStream:
    """The stream of one client."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_LINES)

    def send(self, **fields: Any) -> None:
        """Queue a line."""
        self._put(pack_json(fields) + b"\n")

    def end(self) -> None:
        """End the stream after the lines that wait."""
        self._put(None)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines until the end."""
        while (line := await self._waiting.get()) is not None:
            yield line

    def _put(self, line: bytes | None) -> None:
        if self._waiting.qsize() >= _MAX_LINES - 1:
            while not self._waiting.empty():
                self._waiting.get_nowait()
            line = None
        self._waiting.put_nowait(line)
