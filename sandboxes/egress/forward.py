"""Forward the connections of a sandbox to one address of the host's choice; the sandbox reaches nothing else.

Invariant: the sandbox has no network interface, and nothing that it sends chooses the address. Every connection ends
with the channel, and at most ``MOST_CONNECTIONS`` are open.
"""

from __future__ import annotations

import asyncio

from agentkit.sandboxes.egress.allowlist import parse_host, parse_port
from agentkit.sandboxes.egress.relays import RelayedStream, Source, serve
from agentkit.sandboxes.tasks import bounded, retrieve, stopped

MOST_CONNECTIONS = 64
"""Open connections of one sandbox; further ones are closed at once."""
_CONNECT_TIMEOUT = 15.0
_LINGER = 20.0
"""Seconds until a client must have closed whose server has closed."""
_PIECE = 1 << 16


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``127.0.0.1:8000``, ``[::1]:8000`` or ``name:8000``. Raises ``ValueError``."""
    host, colon, port = text.strip().rpartition(":")
    try:
        if not colon:
            raise ValueError("the port is missing")
        return str(parse_host(host)), parse_port(port)
    except ValueError as error:
        raise ValueError(f"address {text!r}: {error}; write host:port, such as 127.0.0.1:8000") from None


class Forwarder:
    """Connects the sandbox to one address.

    Args:
        address: ``host:port`` as this machine reaches it.
    """

    def __init__(self, address: str) -> None:
        self._host, self._port = parse_address(address)
        self._open = 0

    async def serve(self, source: Source) -> None:
        """Serve the connections of ``source`` until it ends or the caller is cancelled; then close all."""
        await serve(source, self._handle)

    async def _handle(self, stream: RelayedStream) -> None:
        if self._open >= MOST_CONNECTIONS:
            return
        self._open += 1
        try:
            connecting = asyncio.open_connection(self._host, self._port, limit=_PIECE)
            reader, writer = await bounded(connecting, _CONNECT_TIMEOUT, lambda streams: streams[1].transport.abort())
            try:
                await _join(stream, reader, writer)
            finally:
                writer.transport.abort()
        finally:
            self._open -= 1


async def _join(stream: RelayedStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Transfer in both directions until the server has closed, and the client after it."""

    async def send() -> None:
        while data := await stream.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def receive() -> None:
        while data := await reader.read(_PIECE):
            await stream.write(data)
        stream.end()

    sending, receiving = asyncio.ensure_future(send()), asyncio.ensure_future(receive())
    for task in (sending, receiving):
        task.add_done_callback(retrieve)
    try:
        await asyncio.wait({receiving})  # a server that was told the client's end answers it with its own
        receiving.result()
        await asyncio.wait({sending}, timeout=_LINGER)
    finally:
        await stopped({sending, receiving})
