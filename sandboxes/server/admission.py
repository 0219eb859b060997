"""Admission control of the sandbox server: authentication, concurrency, body sizes and slow clients.

Invariant: no byte of a body is read before the token is verified, in constant time. Each body and the sum of all bodies
are bounded, and a client that sends slowly is disconnected. Requests with an ``Origin`` are refused, so web pages are
never clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from agentkit.errors import AccessDenied, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes.server.policy import over_limit
from agentkit.sandboxes.server.protocol import pack_error

if TYPE_CHECKING:
    from agentkit.sandboxes.server.tenants import Tenant, Tenants

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, bytes, Receive, Send], Awaitable[None]]
"""An application that gets the complete body of a request; its ``receive`` reports only the disconnection."""


class AdmissionControl:
    """ASGI middleware: find the tenant of a request by its header, read the body and pass both to its application."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the sandbox server speaks HTTP, not {scope['type']}")
        try:
            tenant, length = self._admit(dict(scope["headers"]))
        except _Rejected as rejected:
            await _reject(send, rejected.status, rejected.error)
            return
        with tenant.share.counted(requests=1, bodies=length):
            try:
                body = await asyncio.wait_for(_read(receive), tenant.share.total.transfer_seconds(length))
                if body is not None:
                    await tenant.app(scope, body, receive, send)
            except asyncio.TimeoutError:
                await _reject(send, 408, ProtocolError("the body was not received in time"))

    def _admit(self, headers: dict[bytes, bytes]) -> tuple[Tenant, int]:
        """Return the tenant and the length of the request's body. Raises ``_Rejected``."""
        tenant = self._tenants.identify(bearer_token(headers))
        if tenant is None:
            raise _Rejected(401, AccessDenied("the token is missing or wrong"))
        if b"origin" in headers:
            raise _Rejected(403, AccessDenied("web pages may not use this server"))
        if b"transfer-encoding" in headers:
            raise _Rejected(411, ProtocolError("the request needs a content-length"))
        length = int(headers.get(b"content-length", b"0"))
        if length > (longest := tenant.share.total.body):
            raise _Rejected(413, over_limit(f"a body of {length} bytes is longer than {longest}"))
        try:
            tenant.share.check(requests=1, bodies=length)
        except QuotaExceeded as error:
            raise _Rejected(429, error) from None
        return tenant, length


def bearer_token(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the token of a request; empty if it has none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token if scheme == b"Bearer" else b""


class _Rejected(Exception):
    def __init__(self, status: int, error: SandboxError) -> None:
        super().__init__(status)
        self.status = status
        self.error = error


async def _reject(send: Send, status: int, error: SandboxError) -> None:
    # The rest of the request is not read.
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": pack_error(error)})


async def _read(receive: Receive) -> bytes | None:
    """Return the complete body; None if the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def http_protocol(header_timeout: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a timeout for the header of a request, which uvicorn does not have."""

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._timer = self.loop.call_later(header_timeout, self._time_out)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting = self.cycle is None or self.cycle.response_complete
            if waiting and self._timer is None:
                self._timer = self.loop.call_later(header_timeout, self._time_out)
            elif not waiting:
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _time_out(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                self.transport.close()

    return Protocol
