"""HTTP/1.1 as sandbox servers speak it: connections that are kept, requests in one write, answers as they come.

Invariant: a request is sent at most once, on one connection, which is kept only if its answer was read to the end. What
fails says whether the request can have arrived: ``Unreachable`` if it cannot, ``Broken`` if it may have.

A general client spends more time on a request than a short command takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from urllib.parse import quote, urlencode, urlsplit

import h11

_PIECE = 1 << 18
_IDLE_MOST = 64


class Unreachable(Exception):
    """There is no connection to the server; nothing was sent. ``refused``: its machine says that nothing listens."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(str(problem) or type(problem).__name__)
        self.refused = isinstance(problem, ConnectionRefusedError)


class Broken(Exception):
    """The connection ended or fell silent before the answer did."""


class Answer:
    """``status``, and the body by ``async for piece in answer``."""

    def __init__(self, connection: _Connection, status: int) -> None:
        self.status = status
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises ``Broken``."""
        while not isinstance(event := await self._connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)


class Client:
    """One server. ``connect`` and ``idle`` are seconds: to reach it, and that an unused connection is kept."""

    def __init__(
        self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, *, connect: float, idle: float
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
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
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
    ) -> AsyncIterator[Answer]:
        """An answer to be read within the context. ``silence``: seconds without a byte after which it is broken.

        Raises ``Unreachable``, ``Broken``.
        """
        target = self._prefix + quote(path) + (f"?{urlencode(query)}" if query else "")
        connection = await self._connection()
        try:
            connection.silence = silence
            length = ("content-length", str(len(content)))
            head = h11.Request(method=method, target=target, headers=[*self._headers, *(headers or {}).items(), length])
            yield Answer(connection, await connection.ask(head, content))
        finally:
            connection.rest()
            if not self.closed and connection.renew() and len(self._idle) < _IDLE_MOST:
                self._idle.append(connection)
            else:
                self._drop(connection)

    def close(self) -> None:
        """End all connections, those in use too."""
        self.closed = True
        for connection in list(self._all):
            self._drop(connection)
        self._idle.clear()

    async def _connection(self) -> _Connection:
        oldest = asyncio.get_running_loop().time() - self._idle_seconds
        while self._idle:
            connection = self._idle.pop()  # The last one used is the least likely to have been closed meanwhile.
            if connection.usable and connection.since >= oldest:
                return connection
            self._drop(connection)
        name = self._host if self._tls is not None else None
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls, server_hostname=name, limit=_PIECE)
        try:
            reader, writer = await asyncio.wait_for(opening, self._connect_seconds)
        except (OSError, asyncio.TimeoutError) as problem:
            raise Unreachable(problem) from None
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(reader, writer)
        self._all.add(connection)
        return connection

    def _drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        connection.abort()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self._silent = False
        self.silence = 0.0
        self.since = 0.0

    @property
    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def ask(self, head: h11.Request, content: bytes) -> int:
        """Send a request; returns the status of its answer. Raises ``Broken``."""
        self._watch()
        parts = [self._state.send(event) for event in (head, h11.Data(data=content), h11.EndOfMessage())]
        try:
            # One write, so that a small request is one packet.
            self._writer.write(b"".join(part for part in parts if part))
            with self._waiting():
                await self._writer.drain()
        except (OSError, RuntimeError) as problem:
            raise self._broken(problem) from None
        while not isinstance(event := await self.next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise Broken("the answer has no head")
        return event.status_code

    async def next_event(self) -> h11.Event:
        """Raises ``Broken``."""
        try:
            while (event := self._state.next_event()) is h11.NEED_DATA:
                with self._waiting():
                    data = await self._reader.read(_PIECE)
                self._state.receive_data(data)
        except (OSError, RuntimeError, h11.RemoteProtocolError) as problem:
            raise self._broken(problem) from None
        if not isinstance(event, h11.Event):
            raise Broken("the server closed the connection")
        return event

    def renew(self) -> bool:
        """Whether it can take another request."""
        if not self.usable or self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        self.since = self._loop.time()
        return True

    def rest(self) -> None:
        """Wait for nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        self.rest()
        self._writer.transport.abort()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Only time in which the server has the word counts: a slow reader here does not make it silent."""
        self._deadline = self._loop.time() + self.silence
        try:
            yield
        finally:
            self._deadline = math.inf

    def _watch(self) -> None:
        now = self._loop.time()
        if self._deadline > now:
            self._timer = self._loop.call_later(min(self._deadline - now, self.silence), self._watch)
        else:
            self._silent = True
            self.abort()

    def _broken(self, problem: BaseException) -> Broken:
        if self._silent:
            return Broken(f"no answer for {self.silence:g} s")
        return Broken(str(problem) or type(problem).__name__)
