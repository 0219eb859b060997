"""Serve the connections of a sandbox to its relay port, each in its own task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from agentkit.errors import SandboxLost
from agentkit.sandboxes.tasks import stopped, tracked

_LOG = logging.getLogger(__name__)


class RelayedStream(Protocol):
    """A connection out of a sandbox; implemented by ``RelayStream``."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...


class Source(Protocol):
    """The part of a channel that is served; implemented by ``AgentChannel``."""

    def relays(self) -> AsyncIterator[RelayedStream]: ...


async def serve(source: Source, handle: Callable[[RelayedStream], Coroutine[Any, Any, None]]) -> None:
    """Handle the connections of ``source`` until it ends or the caller is cancelled; then close all.

    Args:
        source: where the connections come from.
        handle: serves one connection, which is closed afterwards. Errors of either side may leave it.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def connection(stream: RelayedStream) -> None:
        try:
            await handle(stream)
        except (SandboxLost, OSError, asyncio.TimeoutError):
            pass  # one side closed the connection
        except Exception:
            _LOG.exception("egress: a connection failed")
        finally:
            stream.close()

    try:
        with contextlib.suppress(SandboxLost):
            async for stream in source.relays():
                tracked(connection(stream), tasks)
    finally:
        await stopped(tasks)
