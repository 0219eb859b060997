"""A client's connection to one sandbox server: calls, and the event stream of the server.

Invariant: a call is sent once. If its connection breaks after it was sent, it fails with ``side_effects="maybe"``
and is not repeated here. Cancelling a call cancels it on the server before the cancellation continues. When the server
counts as down (``health.py``) or was restarted, all channels of this client to it are lost; while it is down, calls
fail at once and removals wait for its return. While it restarts as it has announced, calls wait for its return.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from agentkit.errors import AccessDenied, EngineUnavailable, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes.backends.remote.health import TICK, HostHealth
from agentkit.sandboxes.backends.remote.http import ConnectFailed, ConnectionBroken, HttpClient, Response
from agentkit.sandboxes.backends.remote.placement import HostState
from agentkit.sandboxes.server.policy import over_limit
from agentkit.sandboxes.server.protocol import CALL_HEADER, CLIENT_HEADER, HEARTBEAT_SECONDS, pack_json, unpack_error
from agentkit.sandboxes.tasks import finished, loop_time, stopped, tracked

_log = logging.getLogger(__name__)

_CONNECT = 5.0
_CANCEL = 10.0
_CALL = 30.0
"""Seconds that a call may take in addition to its own timeout."""
_IDLE = 15.0
"""Seconds that an idle connection is kept: much shorter than in the server."""
_STREAM_SILENCE = 4 * HEARTBEAT_SECONDS
_RETRY = 0.1
_MAX_RETRY = 1.0
"""Shortest and longest pause in seconds between two attempts to connect."""
_CHECK_INTERVAL = 5.0
"""Seconds between two measurements of the round trip."""
_REMOVE = 30.0
_MAX_ERROR = 1 << 20
_MAX_LINE = 16 << 20


@dataclass(frozen=True)
class HostStatus:
    """A sandbox server as one client sees it."""

    url: str
    host: str
    """``host:port``, as in ``Backend.host_of``."""
    state: Literal["up", "unschedulable", "silent", "restarting", "down"]
    """``unschedulable``: it answers, but accepts no new sandboxes; ``silent``: it may be down; ``restarting``: it has
    announced that it will be back."""
    reason: str
    """Why it is not up."""
    used: int
    """Number of sandboxes on the server, of all clients."""
    limit: int
    """Largest number of sandboxes on the server."""
    sandboxes: int
    """Number of sandboxes of this client on the server."""
    cpu: float
    """Share of the processors in use, between 0 and 1."""
    memory: float
    """Share of the memory in use."""
    disk: float
    """Share of the disk in use."""
    round_trip: float | None
    """Seconds that a small request took; None before the first measurement."""


class ServerConnection:
    """The connection to one server.

    Attributes:
        host: ``host:port`` of the server.
        health: whether the server can be reached.
        round_trip: seconds of the last request that measured it.
        pending: number of sandboxes that this client is creating there.
        concurrency: see ``Backend.concurrency``; 0 before the first connection.
        channels: for each channel key, the function to call with the reason when the channel is lost.
        on_event: called with each event of the server, and with None when events may have been missed.
    """

    def __init__(self, url: str, token: str, client: str, tls: ssl.SSLContext | None, patience: float) -> None:
        self.url = url
        self.host = urlsplit(url).netloc.rpartition("@")[2]
        self.health = HostHealth(patience)
        self.round_trip: float | None = None
        self.boot = ""
        self._reported = HostState()
        self.pending = 0
        self.max_body = 1 << 20
        self.concurrency = 0
        self.channels: dict[str, Callable[[str], None]] = {}
        self.on_event: Callable[[dict[str, Any] | None], None] = lambda event: None
        self._error: Exception | None = None
        self._settled = asyncio.Event()
        self._returned = asyncio.Event()
        """Cleared while the server restarts."""
        self._returned.set()
        self._streaming = False
        self._down = True
        """Whether the channels were lost because the server is down."""
        self._removals: set[str] = set()
        """Sandboxes to remove when the server is back."""
        self._check: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        headers = {"authorization": f"Bearer {token}", CLIENT_HEADER: client}
        self._http = HttpClient(url, headers, tls, connect=_CONNECT, idle=_IDLE, heard=self.health.hear)

    async def start(self) -> None:
        """Return when the server has answered. Raises ``AccessDenied``, ``EngineUnavailable``."""
        if not self._tasks:
            for work in (self._follow(), self._watch()):
                tracked(work, self._tasks)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), 2 * _CONNECT)
        if not self.up:
            if isinstance(self._error, AccessDenied | EngineUnavailable):
                raise self._error
            raise self.unavailable(self._error or "no answer in time")

    @property
    def up(self) -> bool:
        """Whether the server can be asked: it may be silent, but does not count as down."""
        return self.health.state != "down"

    @property
    def placement(self) -> HostState:
        """The state of the server for the choice of a host."""
        trusted = self.health.trusted(loop_time())
        return replace(self._reported, reachable=self.up, trusted=trusted, pending=self.pending)

    def status(self, sandboxes: int) -> HostStatus:
        """Return the state of the server, with the number of sandboxes that this client has there."""
        host, state = self._reported, self.health.state
        return HostStatus(
            url=self.url,
            host=self.host,
            state="unschedulable" if state == "up" and not host.accepting else state,
            reason=self.health.reason or host.reason,
            used=host.used,
            limit=host.limit,
            sandboxes=sandboxes,
            cpu=host.cpu,
            memory=host.memory,
            disk=host.disk,
            round_trip=self.round_trip,
        )

    async def close(self) -> None:
        await stopped(self._tasks)
        # Calls are not cancelled one by one: the server notices that the connections end.
        self._http.close()
        self._returned.set()
        self.lose_all("closed")

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
        call = secrets.token_hex(16)
        headers = {CALL_HEADER: call}
        try:
            while True:
                await self._check_callable()
                async with contextlib.AsyncExitStack() as stack:
                    request = self._http.request(
                        method, path, content, silence=timeout + _CALL, headers=headers, query=query
                    )
                    try:
                        response = await stack.enter_async_context(request)
                        if response.status != 200:
                            raise self._error_of(response.status, await self._body(response, _MAX_ERROR))
                    except (ConnectFailed, EngineUnavailable) as problem:
                        if not self._must_wait(problem):
                            raise
                        await asyncio.sleep(_RETRY)
                        continue
                    yield response
                    return
        except asyncio.CancelledError:
            if self.health.state == "up" and not self._http.closed:
                await finished(self._cancel(call))
            raise
        except ConnectFailed as problem:
            raise self.unavailable(problem) from None
        except ConnectionBroken as problem:
            error = self.unavailable(problem)
            error.side_effects = "maybe"
            raise error from None

    async def _check_callable(self) -> None:
        """Wait for the end of a restart. Raises ``EngineUnavailable``."""
        await self._returned.wait()  # `_watch` ends it in time
        if self._http.closed:
            raise self.unavailable("this back end is closed")
        if not self.up:
            raise self.unavailable(self.health.reason)

    def _must_wait(self, problem: ConnectFailed | EngineUnavailable) -> bool:
        """Return whether a call was not executed because the server restarts."""
        if isinstance(problem, ConnectFailed):
            return self.health.state == "restarting"
        return self._refused_by_restart(problem) and problem.side_effects == "none"

    def _refused_by_restart(self, problem: SandboxError) -> bool:
        """Return whether a server that restarts has refused a call; note that it does."""
        seconds = problem.details.get("restarting")
        # A stream announces it itself; or it is that of the next process, and this answer came from the previous one.
        if seconds is not None and not self._streaming:
            self._expect_return(float(seconds))
        return seconds is not None

    def _expect_return(self, seconds: float) -> None:
        self.health.announce_restart(loop_time(), seconds)
        self._returned.clear()

    async def remove(self, id: str) -> None:
        """Remove a sandbox; if the server is down, when it is back.

        Until then only this client's end keeps the sandbox from being removed: the server removes what belongs to no
        connected client, and the reaper of its machine what belongs to no server.
        """
        try:
            await self.call("DELETE", f"/v1/sandboxes/{id}", timeout=_REMOVE)
        except EngineUnavailable:
            await self.verdict()
            if self.up:
                raise
            self.remove_later(id)

    def remove_later(self, id: str) -> None:
        """Remove a sandbox as soon as the server answers."""
        self._removals.add(id)

    async def verdict(self) -> None:
        """Wait until the server has answered or counts as down."""
        if not self._http.closed:
            await asyncio.wait({self._checking()})

    def unavailable(self, reason: object) -> EngineUnavailable:
        details = {"restarting": True} if self.health.state == "restarting" else {}
        return EngineUnavailable(
            f"the sandbox server {self.url} does not answer ({reason}); check that it is running", **details
        )

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

    # Health

    async def _watch(self) -> None:
        """Notice silence and ask the server before it counts as down; measure its round trip regularly."""
        checked = float("-inf")
        while True:
            await asyncio.sleep(TICK)
            self.health.pass_time(loop_time())
            self._judge()
            due = self.up and loop_time() - checked >= _CHECK_INTERVAL
            if due or self.health.state == "silent":
                checked = loop_time()
                self._checking()
            if due and self._removals:
                tracked(self._remove_waiting(), self._tasks)

    def _judge(self) -> None:
        """Lose all channels, and end all calls, once the server counts as down."""
        if self.up or self._down:
            return
        self._down = True
        self._returned.set()
        self.lose_all("engine_down")
        self._http.abort()

    def _checking(self) -> asyncio.Task[None]:
        """Return the task that asks the server whether it runs."""
        if self._check is None or self._check.done():
            self._check = tracked(self._ask(), self._tasks)
        return self._check

    async def _ask(self) -> None:
        """Ask until the server has answered or counts as down; lose all channels if it was restarted."""
        while self.up:
            began = loop_time()
            try:
                fresh = self.health.state != "up"
                async with self._http.request("GET", "/v1/boot", silence=_CALL, fresh=fresh) as response:
                    boot = await self._body(response, _MAX_ERROR)
                self.round_trip = loop_time() - began
                if response.status == 200 and boot != self.boot.encode():
                    self.lose_all("engine_down")
                return
            except ProtocolError:
                return
            except (ConnectFailed, ConnectionBroken) as problem:
                self._note(problem)
            await asyncio.sleep(_RETRY)

    def _note(self, problem: Exception) -> None:
        if isinstance(problem, ConnectFailed) and problem.refused:
            self.health.refuse(loop_time())
            self._judge()

    async def _remove_waiting(self) -> None:
        """Remove the sandboxes whose removal waited for the server."""
        for id in list(self._removals):
            try:
                await self.call("DELETE", f"/v1/sandboxes/{id}", timeout=_REMOVE)
                self._removals.discard(id)
            except EngineUnavailable:
                return
            except SandboxError as error:
                _log.warning("sandbox %s of a failed creation is left on %s: %s", id, self.url, error)

    # Event stream

    async def _follow(self) -> None:
        """Read the event stream and reconnect when it ends, until cancelled."""
        pause = _RETRY
        while True:
            try:
                await self._read_stream()
            except (ConnectFailed, ConnectionBroken, SandboxError, ValueError, TypeError, KeyError) as error:
                self._error = error if isinstance(error, SandboxError) else self.unavailable(error)
                self._note(error)
                if isinstance(error, SandboxError):
                    self._refused_by_restart(error)
            if self._streaming:
                self._streaming = False
                self.on_event(None)
                pause = _RETRY
                await self.verdict()
            self._settled.set()
            await asyncio.sleep(pause)
            pause = _RETRY if self.health.state == "restarting" else min(2 * pause, _MAX_RETRY)

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
            self._reported = replace(self._reported, used=int(used), limit=max(int(limit), 1))
        if host := line.get("host"):
            self._reported = replace(
                self._reported,
                accepting=bool(host["accepting"]),
                reason=str(host["reason"]),
                **{share: float(host[share]) for share in ("cpu", "memory", "disk")},
            )
        if "hello" in line:
            if self.boot not in ("", line["hello"]):
                self.lose_all("engine_down")
            self.boot, self.max_body, self._error = str(line["hello"]), int(line["body"]), None
            self.concurrency = int(line.get("concurrency", 1))
            self.health.connect(loop_time())
            self._streaming, self._down = True, False
            self._returned.set()
            self._settled.set()
        if "restarting" in line:
            self._expect_return(float(line["restarting"]))
        for key, reason in line.get("lost", {}).items():
            if lose := self.channels.pop(key, None):
                lose(str(reason))
        if "event" in line:
            self.on_event(line["event"])
        if "engine" in line:
            self.on_event(None)
