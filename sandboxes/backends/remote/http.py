"""HTTP/1.1 client for sandbox servers: persistent connections, one write per request, streamed responses.

Invariant: a request is sent at most once, on one connection, which is reused only if its response was read completely.
The error says whether the request may have arrived: ``ConnectFailed`` if not, ``ConnectionBroken`` if it may have.

httpcore is not used because of its latency: it takes about 1 ms longer for a small call on loopback, and its connection
pool slows down with the number of concurrent calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from urllib.parse import quote, urlencode, urlsplit

import h11

_CHUNK = 1 << 18
_MAX_IDLE = 64
_LATE = 0.1
"""Seconds that a timer may be late before the data that has arrived meanwhile is read first."""


class ConnectFailed(Exception):
    """No connection to the server; nothing was sent. ``refused``: the machine answers, but no server listens."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(str(problem) or type(problem).__name__)
        self.refused = isinstance(problem, ConnectionRefusedError)


class ConnectionBroken(Exception):
    """The connection ended, or was silent for too long, before the end of the response."""


class Response:
    """The ``status`` of a response, and its body by ``async for chunk in response``."""

    def __init__(self, connection: _Connection, status: int) -> None:
        self.status = status
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises ``ConnectionBroken``."""
        while not isinstance(event := await self._connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)


class HttpClient:
    """Connections to one server.

    Args:
        url: the server.
        headers: headers of every request.
        tls: for ``https``.
        connect: seconds to open a connection.
        idle: seconds that an unused connection is kept.
        heard: called when data arrives.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        *,
        connect: float,
        idle: float,
        heard: Callable[[], None],
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path
        self._headers = [("host", parts.netloc.rpartition("@")[2]), *headers.items()]
        self._tls = tls if parts.scheme == "https" else None
        self._connect_seconds = connect
        self._idle_seconds = idle
        self._heard = heard
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = set()
        self.closed = False

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        *,
        silence: float,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        fresh: bool = False,
    ) -> AsyncIterator[Response]:
        """Send a request and yield its response.

        Args:
            method: the HTTP method.
            path: the path below that of the URL.
            content: the body.
            silence: longest time without a byte from the server, in seconds.
            headers: further headers.
            query: parameters of the query.
            fresh: use a new connection, because those that exist may be broken.

        Raises:
            ConnectFailed: nothing was sent.
            ConnectionBroken: the request may have arrived.
        """
        target = self._prefix + quote(path) + (f"?{urlencode(query)}" if query else "")
        connection = await (self._open() if fresh else self._connection())
        try:
            connection.silence = silence
            length = ("content-length", str(len(content)))
            head = h11.Request(method=method, target=target, headers=[*self._headers, *(headers or {}).items(), length])
            yield Response(connection, await connection.send(head, content))
        finally:
            connection.stop_timer()
            if not self.closed and connection.renew() and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
            else:
                self._drop(connection)

    def close(self) -> None:
        """Close all connections, including those in use."""
        self.closed = True
        self.abort()

    def abort(self) -> None:
        """Let all requests fail that are in progress."""
        for opening in self._opening:
            opening.cancel()
        for connection in list(self._all):
            self._drop(connection)
        self._idle.clear()

    async def _connection(self) -> _Connection:
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()  # the most recent one is the least likely to have been closed
            if connection.usable and connection.since >= oldest:
                return connection
            self._drop(connection)
        return await self._open()

    async def _open(self) -> _Connection:
        name = self._host if self._tls is not None else None
        opening = asyncio.ensure_future(
            asyncio.open_connection(self._host, self._port, ssl=self._tls, server_hostname=name, limit=_CHUNK)
        )
        self._opening.add(opening)
        try:
            await asyncio.wait({opening}, timeout=self._connect_seconds)
            if not opening.done():
                raise ConnectFailed(asyncio.TimeoutError())
            if opening.cancelled():
                raise ConnectFailed(ConnectionAbortedError("the server is down"))
            reader, writer = opening.result()
        except BaseException as problem:
            opening.cancel()
            opening.add_done_callback(_abandon)
            if isinstance(problem, OSError):
                raise ConnectFailed(problem) from None
            raise
        finally:
            self._opening.discard(opening)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(reader, writer, self._heard)
        self._all.add(connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        connection.abort()


def _abandon(opening: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].transport.abort()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Callable[[], None]) -> None:
        self._reader = reader
        self._writer = writer
        self._heard = heard
        self._state = h11.Connection(h11.CLIENT)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self._check_at = math.inf
        self._silent = False
        self.silence = 0.0
        self.since = 0.0

    @property
    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, head: h11.Request, content: bytes) -> int:
        """Send a request and return the status of its response. Raises ``ConnectionBroken``."""
        self._check_at = math.inf
        self._check_silence()
        parts = [self._state.send(event) for event in (head, h11.Data(data=content), h11.EndOfMessage())]
        try:
            # One write: a small request is one packet.
            self._writer.write(b"".join(part for part in parts if part))
            with self._waiting():
                await self._writer.drain()
        except (OSError, RuntimeError) as problem:
            raise self._broken(problem) from None
        while not isinstance(event := await self.next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise ConnectionBroken("the response has no head")
        return event.status_code

    async def next_event(self) -> h11.Event:
        """Raises ``ConnectionBroken``."""
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                with self._waiting():
                    data = await self._reader.read(_CHUNK)
                if data:
                    self._heard()
                self._state.receive_data(data)
        except (OSError, RuntimeError, h11.RemoteProtocolError) as problem:
            raise self._broken(problem) from None
        if not isinstance(event, h11.Event):
            raise ConnectionBroken("the server closed the connection")
        return event

    def renew(self) -> bool:
        """Prepare for another request; return whether that is possible."""
        if not self.usable or self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        self.since = self._loop.time()
        return True

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        self.stop_timer()
        self._writer.transport.abort()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time as silence of the server; the time that the reader takes does not count."""
        self._deadline = self._loop.time() + self.silence
        try:
            yield
        finally:
            self._deadline = math.inf

    def _check_silence(self) -> None:
        now = self._loop.time()
        late = now - self._check_at > _LATE  # this process: the data may have arrived
        if late or self._deadline > now:
            delay = _LATE if late else min(self._deadline - now, self.silence)
            self._check_at = now + delay
            self._timer = self._loop.call_at(self._check_at, self._check_silence)
        else:
            self._silent = True
            self.abort()

    def _broken(self, problem: BaseException) -> ConnectionBroken:
        if self._silent:
            return ConnectionBroken(f"no data for {self.silence:g} s")
        return ConnectionBroken(str(problem) or type(problem).__name__)
