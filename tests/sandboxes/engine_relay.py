"""A relay between a back end and its engine, which a test can close, stall, or stop from forwarding events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class EngineRelay:
    """Relay connections to the engine. The engine itself and its direct clients are not affected."""

    def __init__(self, path: Path, engine: str) -> None:
        self.host = f"unix://{path}"
        self.deaf = False
        """Requests for events are taken and never answered."""
        self._path, self._engine = path, engine
        self._server: asyncio.AbstractServer | None = None
        self._open = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Relay connections normally again."""
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        self._open.set()

    def stall(self) -> None:
        """Accept connections, but relay nothing."""
        self._open.clear()

    async def refuse(self) -> None:
        """End existing connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            self._server = None
        await self.cut()

    async def cut(self) -> None:
        """End existing connections; new ones are accepted."""
        ending = list(self._connections)
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            request = await reader.read(1 << 16)
            if self.deaf and b"/events" in request.split(b"\r\n")[0]:
                await asyncio.Event().wait()
            there, back = await asyncio.open_unix_connection(self._engine)
            pumps = [
                asyncio.ensure_future(self._pump(reader, back, request)),
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

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes = b"") -> None:
        data = first or await reader.read(1 << 16)
        while data:
            await self._open.wait()
            writer.write(data)
            await writer.drain()
            data = await reader.read(1 << 16)


@contextlib.asynccontextmanager
async def engine_relay(directory: Path, engine: str) -> AsyncIterator[EngineRelay]:
    relay = EngineRelay(directory / "e.sock", engine)
    await relay.open()
    try:
        yield relay
    finally:
        await relay.refuse()
