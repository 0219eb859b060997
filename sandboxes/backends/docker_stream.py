"""What the engine streams (an exec, its events), read straight from its socket by the event loop.

Invariant: nothing is read ahead of the reader but one bounded buffer, so that a program is held back by who reads it;
every read can be cancelled and loses nothing. (The SDK's own streams block a thread without a timeout, and may lose
what came together with the answer's head.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any

from agentkit.errors import EngineUnavailable, SandboxError
from agentkit.sandboxes.types import Stream

_PIECE = 1 << 16
_BUFFER = 1 << 16
_EVENT_BUFFER = 1 << 24
_STREAMS: dict[int, Stream] = {1: "stdout", 2: "stderr"}


class ExecStream:
    """Output as ``(stream, data)`` pieces, and input. Made by ``open_stream``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream: Stream = "stdout"
        self._left = 0

    async def read(self) -> tuple[Stream, bytes] | None:
        """The next piece, at most 64 KiB; None at the end, whatever ended it."""
        try:
            while self._left == 0:
                head = await self._reader.readexactly(8)
                self._stream = _STREAMS.get(head[0], "stdout")
                self._left = int.from_bytes(head[4:], "big")
            data = await self._reader.read(min(self._left, _PIECE))
        except (OSError, asyncio.IncompleteReadError):
            return None
        self._left -= len(data)
        return (self._stream, data) if data else None

    async def write(self, data: bytes) -> None:
        """Raises ``OSError`` when nobody reads any more."""
        self._writer.write(data)
        await self._writer.drain()

    def write_eof(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def close(self) -> None:
        """Drop the connection; the program is not killed by that."""
        with contextlib.suppress(Exception):
            self._writer.transport.abort()


async def open_stream(socket: str, api: str, exec_id: str, timeout: float) -> ExecStream:
    """Start a prepared exec and attach to it. Raises ``EngineUnavailable``, ``SandboxError`` if it cannot start."""
    body = json.dumps({"Detach": False, "Tty": False})
    head = (
        f"POST /v{api}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return ExecStream(*await _request(socket, head + body, timeout, _BUFFER))


async def events(
    socket: str, api: str, filters: dict[str, Any], timeout: float
) -> AsyncGenerator[dict[str, Any], None]:
    """What happens at the engine from now on. Raises ``EngineUnavailable`` when it goes away."""
    query = urllib.parse.urlencode({"filters": json.dumps(filters)})
    # An answer to HTTP/1.0 is not cut into chunks: a line is an event.
    head = f"GET /v{api}/events?{query} HTTP/1.0\r\nHost: docker\r\n\r\n"
    reader, writer = await _request(socket, head, timeout, _EVENT_BUFFER)
    try:
        while line := await reader.readline():
            yield json.loads(line)
    except (OSError, ValueError) as error:
        raise EngineUnavailable(f"the engine at {socket} broke off its events: {error}") from error
    finally:
        writer.transport.abort()
    raise EngineUnavailable(f"the engine at {socket} ended its events")


async def _request(
    socket: str, request: str, timeout: float, buffer: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request; what comes after the answer's head is for the caller to read."""
    task = asyncio.ensure_future(_open(socket, request, buffer))
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


async def _open(socket: str, request: str, buffer: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(socket, limit=buffer)
    try:
        writer.write(request.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        if status not in (101, 200):
            said = await reader.read(1000)
            raise SandboxError(f"the engine refuses: {said.decode('utf-8', 'replace')}", status=status)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _drop(task: asyncio.Task[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
