"""Read one request, head and body, from a client of the proxy.

Invariant: at most one head, one piece and one line are in memory; bytes after the request are never part of its body. A
malformed body raises ``ConnectionAbortedError``, since an answer is no longer possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from agentkit.sandboxes.egress.relays import RelayedStream
from agentkit.sandboxes.egress.requests import MAX_HEAD, Refused, Request, parse
from agentkit.sandboxes.tasks import retrieve, stopped

_MAX_LINE = 4096
_MAX_TRAILERS = 100


class ClientReader:
    """Reader of one connection; ``rest`` holds bytes that were read ahead."""

    def __init__(self, stream: RelayedStream) -> None:
        self.stream = stream
        self.rest = b""

    async def read(self) -> bytes:
        data, self.rest = self.rest, b""
        return data or await self.stream.read()

    async def head(self) -> Request:
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0 and len(data) <= MAX_HEAD:
            piece = await self.stream.read()
            if not piece:
                raise ConnectionAbortedError("the client closed before it sent a request")
            data += piece
        if end < 0 or end > MAX_HEAD:
            raise Refused("oversized", f"the head of the request is longer than {MAX_HEAD} bytes")
        self.rest = bytes(data[end + 4 :])
        return parse(bytes(data[: end + 4]))

    async def exactly(self, count: int) -> AsyncIterator[bytes]:
        while count > 0:
            data = await self.read()
            if not data:
                raise ConnectionAbortedError("the body of the request is incomplete")
            self.rest = data[count:]
            count -= len(data[:count])
            yield data[: len(data) - len(self.rest)]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield a chunked body, without its extensions and trailers."""
        while True:
            size = (await self._line()).partition(b";")[0].strip()
            if not 0 < len(size) <= 15 or size.strip(b"0123456789abcdefABCDEF"):
                raise ConnectionAbortedError("the body of the request is malformed")
            count = int(size, 16)
            if count == 0:
                break
            yield b"%x\r\n" % count
            async for data in self.exactly(count):
                yield data
            if await self._line():
                raise ConnectionAbortedError("the body of the request is malformed")
            yield b"\r\n"
        for _ in range(_MAX_TRAILERS):
            if not await self._line():
                break
        yield b"0\r\n\r\n"

    async def _line(self) -> bytes:
        while b"\r\n" not in self.rest:
            if len(self.rest) > _MAX_LINE or not (data := await self.stream.read()):
                raise ConnectionAbortedError("the body of the request is malformed")
            self.rest += data
        line, _, self.rest = self.rest.partition(b"\r\n")
        return line

    async def wait_closed(self, seconds: float) -> None:
        """Discard input until the client has closed, so that what it was sent arrives."""

        async def drain() -> None:
            while await self.stream.read():
                pass

        task = asyncio.ensure_future(drain())
        task.add_done_callback(retrieve)
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            await stopped([task])
