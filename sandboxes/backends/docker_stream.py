"""What happens at the engine, as it streams it, read straight from its socket by the event loop.

Invariant: nothing is read ahead of the reader but one bounded buffer; every read can be cancelled. (The SDK's own
stream blocks a thread without a timeout.)
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any

from agentkit.errors import EngineUnavailable, SandboxError

_BUFFER = 1 << 24


async def events(
    socket: str, api: str, filters: dict[str, Any], timeout: float
) -> AsyncGenerator[dict[str, Any], None]:
    """What happens at the engine from now on. Raises ``EngineUnavailable`` when it goes away."""
    query = urllib.parse.urlencode({"filters": json.dumps(filters)})
    # An answer to HTTP/1.0 is not cut into chunks: a line is an event.
    head = f"GET /v{api}/events?{query} HTTP/1.0\r\nHost: docker\r\n\r\n"
    reader, writer = await _request(socket, head, timeout)
    try:
        while line := await reader.readline():
            yield json.loads(line)
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"the engine at {socket} broke off its events: {error}") from error
    finally:
        writer.transport.abort()
    raise EngineUnavailable(f"the engine at {socket} ended its events")


async def _request(socket: str, request: str, timeout: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request; what comes after the answer's head is for the caller to read."""
    task = asyncio.ensure_future(_open(socket, request))
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise EngineUnavailable(f"the engine at {socket} did not answer in {timeout:g} s")
        return task.result()
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise EngineUnavailable(f"the engine at {socket} broke off: {error}") from error
    except BaseException:
        task.cancel()
        task.add_done_callback(_drop)
        raise


async def _open(socket: str, request: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(socket, limit=_BUFFER)
    try:
        writer.write(request.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        if status != 200:
            said = await reader.read(1000)
            raise SandboxError(f"the engine refuses: {said.decode('utf-8', 'replace')}", status=status)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _drop(task: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
