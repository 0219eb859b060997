"""The door of a sandbox server: who may come in, with how much, and how long they may take.

Invariant: no byte of a body is read for someone without the token, which is compared in constant time; no body is
longer than allowed, and all together are no longer than allowed; nobody holds a connection by sending slowly. A web
page is never a client: requests with an ``Origin`` are refused and no header invites one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from agentkit.errors import AccessDenied, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes.remote_protocol import pack_error
from agentkit.sandboxes.server_policy import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, bytes, Receive, Send], Awaitable[None]]
"""Gets the request's body as a whole, and hears by ``Receive`` only that the client left."""


class Gate:
    """The ASGI application: admits requests, reads their bodies, and gives them to the server's own."""

    def __init__(self, app: App, token: str, limits: Limits) -> None:
        self._app = app
        self._digest = hashlib.sha256(b"Bearer " + token.encode()).digest()
        self._limits = limits
        self._requests = 0
        self._bytes = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this server speaks HTTP, not {scope['type']}")
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            length = self._admit(headers)
        except _Refusal as refusal:
            await refusal.send(send)
            return
        self._requests += 1
        self._bytes += length
        try:
            body = await asyncio.wait_for(_read(receive, length), self._limits.seconds(length))
            if body is not None:
                await self._app(scope, body, receive, send)
        except asyncio.TimeoutError:
            await _Refusal(408, ProtocolError("the body did not come in time")).send(send)
        finally:
            self._requests -= 1
            self._bytes -= length

    def _admit(self, headers: dict[bytes, bytes]) -> int:
        """The length of the request's body."""
        given = hashlib.sha256(headers.get(b"authorization", b"")).digest()
        if not hmac.compare_digest(given, self._digest):
            raise _Refusal(401, AccessDenied("the token is missing or not this server's"))
        if b"origin" in headers:
            raise _Refusal(403, AccessDenied("web pages may not use this server"))
        if b"transfer-encoding" in headers:
            raise _Refusal(411, ProtocolError("the length of the body must be told"))
        length = int(headers.get(b"content-length", b"0"))
        if length > self._limits.body:
            raise _Refusal(413, _final(f"a body of {length} bytes is longer than {self._limits.body}"))
        if self._requests >= self._limits.requests:
            raise _Refusal(429, QuotaExceeded(f"{self._requests} calls run already; try again later"))
        if self._bytes + length > self._limits.bodies:
            raise _Refusal(429, QuotaExceeded(f"calls of {self._bytes} bytes run already; try again later"))
        return length


def _final(message: str) -> QuotaExceeded:
    error = QuotaExceeded(message)
    error.retryable = False
    return error


class _Refusal(Exception):
    def __init__(self, status: int, error: SandboxError) -> None:
        super().__init__(status)
        self._status = status
        self._error = error

    async def send(self, send: Send) -> None:
        # The rest of the request is not worth being read.
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": pack_error(self._error)})


async def _read(receive: Receive, length: int) -> bytes | None:
    """The whole body; None if the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def impatient(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which by itself waits for ever for the rest of a header."""

    class Impatient(H11Protocol):
        _header: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._header = self.loop.call_later(seconds, self._late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting = self.cycle is None or self.cycle.response_complete
            if waiting and self._header is None:
                self._header = self.loop.call_later(seconds, self._late)
            elif not waiting:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _stop_waiting(self) -> None:
            if self._header is not None:
                self._header.cancel()
                self._header = None

        def _late(self) -> None:
            self._header = None
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

    return Impatient
