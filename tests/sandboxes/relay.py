"""Relays in front of a sandbox server or an engine, which a test can stall, cut or close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Relay:
    """Relays connections. While it is stalled, it accepts connections but forwards nothing."""

    def __init__(self, connect: Connect) -> None:
        self.url = ""
        self._connect = connect
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    async def cut(self) -> None:
        """End existing connections; new ones are accepted."""
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            begun = await self._begin(reader)
            there, back = await self._connect()
            pumps = [
                asyncio.ensure_future(self._pump(reader, back, begun)),
                asyncio.ensure_future(self._pump(there, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the other side sees the end
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _begin(self, reader: asyncio.StreamReader) -> bytes:
        """Return what was read before the connection to the other side is opened."""
        return b""

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            while data := begun or await reader.read(1 << 16):
                begun = b""
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()


class EngineRelay(Relay):
    """Relays connections to an engine. The engine itself and its direct clients are not affected."""

    def __init__(self, path: Path, engine: str) -> None:
        super().__init__(lambda: asyncio.open_unix_connection(engine))
        self.host = f"unix://{path}"
        self.deaf = False
        """Requests for events are taken and never answered."""
        self._path = path
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Relay connections normally again."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self.serve, self._path)
        self.resume()

    async def refuse(self) -> None:
        """End existing connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            self._server = None
        await self.cut()

    async def _begin(self, reader: asyncio.StreamReader) -> bytes:
        request = await reader.read(1 << 16)
        if self.deaf and b"/events" in request.split(b"\r\n")[0]:
            await asyncio.Event().wait()
        return request


@contextlib.asynccontextmanager
async def relayed(target: str) -> AsyncIterator[Relay]:
    """Relay connections to the server at ``target`` (``host:port``)."""
    host, _, port = target.rpartition(":")
    relay = Relay(lambda: asyncio.open_connection(host, int(port)))
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        await relay.cut()


@contextlib.asynccontextmanager
async def engine_relay(directory: Path, engine: str) -> AsyncIterator[EngineRelay]:
    """Relay connections to the engine with the socket ``engine``."""
    relay = EngineRelay(directory / "e.sock", engine)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.refuse()
