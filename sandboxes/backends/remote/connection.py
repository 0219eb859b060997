"""A client's connection to one sandbox server: calls, and the event stream of the server.

Invariant: a call is sent once. If its connection breaks after it was sent, it fails with ``side_effects="maybe"``
and is not repeated here. Cancelling a call cancels it on the server before the cancellation continues. If a server does
not answer for ``patience`` seconds, or was restarted, all channels of this client to it are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from agentkit.errors import AccessDenied, EngineUnavailable, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes.backends.remote.http import ConnectFailed, ConnectionBroken, HttpClient, Response
from agentkit.sandboxes.backends.remote.placement import HostState
from agentkit.sandboxes.server.policy import over_limit
from agentkit.sandboxes.server.protocol import CALL_HEADER, CLIENT_HEADER, HEARTBEAT_SECONDS, pack_json, unpack_error
from agentkit.sandboxes.tasks import finished, loop_time, stopped

_CONNECT = 5.0
_CANCEL = 10.0
_CALL = 30.0
"""Seconds that a call may take in addition to its own timeout."""
_IDLE = 15.0
"""Seconds that an idle connection is kept: much shorter than in the server."""
_STREAM_SILENCE = 4 * HEARTBEAT_SECONDS
_MAX_RETRY_PAUSE = 2.0
_PROBE = 0.1
_REFUSED = 0.5
"""Seconds of refused connections after which the server has ended, and its sandboxes with it."""
_MAX_ERROR = 1 << 20
_MAX_LINE = 16 << 20


class ServerConnection:
    """The connection to one server.

    Attributes:
        host: ``host:port`` of the server.
        up: whether the server answers.
        load: number of sandboxes on the server, and its limit.
        pending: number of sandboxes that this client is creating there.
        channels: for each channel key, the function to call with the reason when the channel is lost.
        on_event: called with each event of the server, and with None when events may have been missed.
    """

    def __init__(self, url: str, token: str, client: str, tls: ssl.SSLContext | None, patience: float) -> None:
        self.url = url
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self.up = False
        self.boot = ""
        self.load = (0, 1)
        self.pending = 0
        self.max_body = 1 << 20
        self.channels: dict[str, Callable[[str], None]] = {}
        self.on_event: Callable[[dict[str, Any] | None], None] = lambda event: None
        self._patience = patience
        self._error: Exception | None = None
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        headers = {"authorization": f"Bearer {token}", CLIENT_HEADER: client}
        self._http = HttpClient(url, headers, tls, connect=_CONNECT, idle=_IDLE)

    async def start(self) -> None:
        """Return when the server has answered. Raises ``AccessDenied``, ``EngineUnavailable``."""
        self._task = self._task or asyncio.ensure_future(self._follow())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), 2 * _CONNECT)
        if isinstance(self._error, AccessDenied) or (not self.up and isinstance(self._error, EngineUnavailable)):
            raise self._error
        if not self.up:
            raise self.unavailable(self._error or "no answer in time")

    @property
    def placement(self) -> HostState:
        """What is known for the choice of a server."""
        used, limit = self.load
        return HostState(reachable=self.up, used=used, limit=limit, pending=self.pending)

    async def close(self) -> None:
        if self._task is not None:
            await stopped([self._task])
        # Calls are not cancelled one by one: the server notices that the connections end.
        self.up = False
        self.lose_all("closed")
        self._http.close()

    async def call(
        self,
        method: str,
        path: str,
        content: bytes = b"",
        *,
        timeout: float = 0.0,
        limit: int = _MAX_LINE,
        **query: Any,
    ) -> bytes:
        """Return the body of the response.

        Args:
            method: the HTTP method.
            path: the path, starting with ``/v1/``.
            content: the body of the request.
            timeout: seconds that the call itself may take.
            limit: largest length of the response's body.
            query: parameters of the query.

        Raises:
            SandboxError: what the server reports.
            EngineUnavailable: the server cannot be reached, or the connection broke.
            ProtocolError: the response is too long or malformed.
        """
        async with self.exchange(method, path, content, timeout=timeout, **query) as response:
            return await self._body(response, limit)

    @contextlib.asynccontextmanager
    async def exchange(
        self, method: str, path: str, content: bytes = b"", *, timeout: float = 0.0, **query: Any
    ) -> AsyncIterator[Response]:
        """Send a call whose response is read within the context. Raises like ``call``."""
        if len(content) > self.max_body:
            raise over_limit(f"{len(content)} bytes are more than the {self.max_body} that {self.url} accepts at once")
        if self._http.closed:
            raise self.unavailable("this back end is closed")
        call = secrets.token_hex(16)
        headers = {CALL_HEADER: call}
        request = self._http.request(method, path, content, silence=timeout + _CALL, headers=headers, query=query)
        try:
            async with request as response:
                if response.status != 200:
                    raise self._error_of(response.status, await self._body(response, _MAX_ERROR))
                yield response
        except asyncio.CancelledError:
            if self.up:
                await finished(self._cancel(call))
            raise
        except ConnectFailed as problem:
            raise self.unavailable(problem) from None
        except ConnectionBroken as problem:
            error = self.unavailable(problem)
            error.side_effects = "maybe"
            await self._probe()
            raise error from None

    def unavailable(self, reason: object) -> EngineUnavailable:
        return EngineUnavailable(f"the sandbox server {self.url} does not answer ({reason}); check that it is running")

    def lose_all(self, reason: str) -> None:
        for lose in list(self.channels.values()):
            lose(reason)
        self.channels.clear()

    def _error_of(self, status: int, body: bytes) -> Exception:
        if status == 503:
            return QuotaExceeded(f"the sandbox server {self.url} has reached its number of connections")
        error = unpack_error(body)
        if isinstance(error, AccessDenied) and status == 401:
            return AccessDenied(f"{self.url}: {error}; both sides need the same token")
        return error

    async def _body(self, response: Response, limit: int) -> bytes:
        body = bytearray()
        async for chunk in response:
            body += chunk
            if len(body) > limit:
                raise ProtocolError(f"a response of {self.url} is longer than {limit} bytes")
        return bytes(body)

    async def _cancel(self, call: str) -> None:
        # If the server does not get this, it notices that the connection of the call ended.
        with contextlib.suppress(ConnectFailed, ConnectionBroken):
            async with self._http.request("DELETE", f"/v1/calls/{call}", silence=_CANCEL):
                pass

    async def _probe(self) -> None:
        """Lose all channels unless the server answers within ``patience``; sooner if it refuses connections."""
        start = loop_time()
        refused = False
        while self.channels:
            left = start + (_REFUSED if refused else self._patience) - loop_time()
            if left <= 0:
                break
            try:
                async with self._http.request("GET", "/v1/boot", silence=max(left, _PROBE)) as response:
                    if response.status != 200 or await self._body(response, _MAX_ERROR) == self.boot.encode():
                        return
                break
            except (ConnectFailed, ConnectionBroken) as problem:
                refused = isinstance(problem, ConnectFailed) and problem.refused
            await asyncio.sleep(_PROBE)
        self.lose_all("engine_down")

    # Event stream

    async def _follow(self) -> None:
        """Read the event stream and reconnect when it ends, until cancelled."""
        pause, last = _PROBE, loop_time()
        while True:
            refused = False
            try:
                await self._read_stream()
            except (ConnectFailed, ConnectionBroken, SandboxError, ValueError, TypeError, KeyError) as error:
                self._error = error if isinstance(error, SandboxError) else self.unavailable(error)
                refused = isinstance(error, ConnectFailed) and error.refused
            if self.up:
                pause, last = _PROBE, loop_time()
                self.up = False
                self.on_event(None)
            if loop_time() - last >= (_REFUSED if refused else self._patience):
                self.lose_all("engine_down")
            self._settled.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_PAUSE, max(self._patience / 4, _PROBE))

    async def _read_stream(self) -> None:
        keys = pack_json(list(self.channels))
        async with self._http.request("POST", "/v1/stream", keys, silence=_STREAM_SILENCE) as response:
            if response.status != 200:
                raise self._error_of(response.status, await self._body(response, _MAX_ERROR))
            rest = b""
            async for chunk in response:
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ProtocolError(f"a line of {self.url} is longer than {_MAX_LINE} bytes")
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, line: dict[str, Any]) -> None:
        if "load" in line:
            used, limit = line["load"]
            self.load = (int(used), max(int(limit), 1))
        if "hello" in line:
            if self.boot not in ("", line["hello"]):
                self.lose_all("engine_down")
            self.boot, self.max_body, self.up, self._error = str(line["hello"]), int(line["body"]), True, None
            self._settled.set()
        for key, reason in line.get("lost", {}).items():
            if lose := self.channels.pop(key, None):
                lose(str(reason))
        if "event" in line:
            self.on_event(line["event"])
        if "engine" in line:
            self.on_event(None)
