"""An HTTP server for an ASGI application, in the event loop of its user.

Invariant: the socket is bound before the server starts, so its address is known and is either free or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn

from agentkit.errors import ConfigError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_STOP_SECONDS = 3


class HttpServer:
    """A server, for ``async with``; ``url`` is its address.

    Args:
        app: the ASGI application.
        host: the address to listen on.
        port: the port; 0 chooses a free one.
        certificate: path of a TLS certificate.
        key: path of the key of the certificate.
        options: further settings of uvicorn.

    Raises:
        ConfigError: the address is in use, or the certificate cannot be used.
    """

    def __init__(
        self,
        app: App,
        host: str,
        port: int,
        *,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        **options: Any,
    ) -> None:
        settings = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            interface="asgi3",
            http="h11",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_STOP_SECONDS,
            ssl_certfile=certificate,
            ssl_keyfile=None if key is None else str(key),
            **{"ws": "none", **options},
        )
        try:
            settings.load()
        except OSError as error:
            raise ConfigError(f"the certificate {certificate} and its key {key} cannot be used: {error}") from None
        self._socket = _listen(host, port)
        address = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if certificate is None else 'https'}://{address}:{self._socket.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(settings)
        # Signals belong to the process that uses the server.
        self._uvicorn.capture_signals = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]

    async def __aenter__(self) -> HttpServer:
        self._serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        await asyncio.wait({self._serving})
        self.close()

    def close(self) -> None:
        """Close the socket of a server that was not started."""
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another, or 0") from None
    # Small answers would otherwise wait for the client's delayed acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
