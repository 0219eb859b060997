"""Sandbox servers in memory: everything of a client and of its servers except the bytes between them.

Invariant: a request reaches the real application of a server, through its admission control. A host behaves as a
machine does: a crashed one loses its sandboxes, one that refuses connections answers at once, and one that is silent
answers nothing until it is reachable again, when everything that was sent arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from unittest import mock
from urllib.parse import quote, urlencode, urlsplit

from agentkit.sandboxes.backends.remote import connection
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.backends.remote.http import ConnectFailed, ConnectionBroken
from agentkit.sandboxes.pool.health import HostUsage
from agentkit.sandboxes.server.admission import AdmissionControl, Message
from agentkit.sandboxes.server.app import SandboxApp
from agentkit.sandboxes.server.config import ServerConfig
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.server.policy import Quota
from agentkit.sandboxes.server.tenants import Tenants
from agentkit.sandboxes.testing.fake import Command, FakeBackend, FakeFile

TOKEN = "a-token-of-the-simulation-alone"
LATENCY = 0.0005
"""Seconds that a request travels."""
DISCONNECTED = 60.0
"""Seconds after which a server removes the sandboxes of clients that are gone."""


async def append(command: Command, name: str, line: str) -> None:
    """Append a line to a file of the working directory."""
    await command.sleep()
    path = f"{command.request.cwd}/{name}"
    before = command.box.files.get(path, FakeFile()).data
    command.box.files[path] = FakeFile(before + f"{line}\n".encode())


async def cat(command: Command, name: str) -> None:
    """Print a file of the working directory."""
    await command.write(command.box.files[f"{command.request.cwd}/{name}"].data)


class _Engine(FakeBackend):
    def note(self, op: str, id: str) -> None:
        """Keep no record of the calls: there are millions."""


class SimulatedHost:
    """A machine with a sandbox server on a scripted back end.

    Attributes:
        name: its name in URLs.
        usage: the use of its memory and disk.
        engine: its back end since the machine started.
        since: time of the last change of its state.
    """

    def __init__(self, name: str, limit: int, seed: int) -> None:
        self.name, self.limit = name, limit
        self.usage = HostUsage(0.1, 0.1)
        self.engine = _Engine()
        self.most = 0
        """The most sandboxes that existed on it at once."""
        self.since = 0.0
        self.listening = False
        self.reachable = asyncio.Event()
        self.exchanges: set[_Exchange] = set()
        self._seed = seed

    @property
    def usable(self) -> bool:
        """Whether it creates sandboxes."""
        return self.listening and self.reachable.is_set() and not self.tenants.host.reason

    async def start(self) -> None:
        """Start the machine and its server."""
        self.engine = _Engine(self._seed, commands={"append": append, "cat": cat})
        config = ServerConfig(quota=Quota(sandboxes=self.limit, disconnected_seconds=DISCONNECTED))
        host = Host(config.watermarks.shares(), lambda: self.usage)
        self.tenants = Tenants(self.engine, host, SandboxApp)
        self.app = AdmissionControl(self.tenants)
        await self.tenants.start(config, [TOKEN])
        self.listening = True
        self.reachable.set()
        self._changed()

    def crash(self, *, silent: bool) -> None:
        """End the machine and all its sandboxes. ``silent``: nothing answers, instead of refusing connections."""
        self.listening = False
        if silent:
            self.reachable.clear()
        for exchange in list(self.exchanges):
            exchange.end(None if silent else ConnectionResetError("the machine ended"))
        for task in [*self.tenants._tasks, *(task for one in self.tenants.sessions().values() for task in one._tasks)]:
            task.cancel()
        self.most = max(self.most, self.engine.most)
        self.engine.engine_down(kill=True)
        self.engine.boxes.clear()
        self._changed()

    async def stop(self) -> None:
        """Stop the server in order: it removes its sandboxes."""
        self.listening = False
        await self.tenants.stop()
        for exchange in list(self.exchanges):
            exchange.end(ConnectionResetError("the server ended"))
        self.most = max(self.most, self.engine.most)
        self._changed()

    def cut_off(self, cut: bool) -> None:
        """Let no byte pass in either direction, or all that was sent meanwhile."""
        self.reachable.clear() if cut else self.reachable.set()
        self._changed()

    def press(self, share: float) -> None:
        """Set the use of its memory."""
        self.usage = HostUsage(share, 0.1)
        self._changed()

    def drain(self, draining: bool) -> None:
        self.tenants.drain(draining)
        self._changed()

    def _changed(self) -> None:
        self.since = asyncio.get_running_loop().time()


class _Exchange:
    """A request and its response."""

    def __init__(
        self, host: SimulatedHost, scope: Message, content: bytes, silence: float, heard: Callable[[], None]
    ) -> None:
        self._host, self._app, self._scope, self._silence = host, host.app, scope, silence
        self._heard = heard
        self._content: bytes | None = content
        self._closed = asyncio.Event()
        self._received: deque[bytes | Exception | None] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.status = 0
        self._task = asyncio.ensure_future(self._serve())
        host.exchanges.add(self)

    async def _serve(self) -> None:
        try:
            await asyncio.sleep(LATENCY)
            await self._host.reachable.wait()
            await self._app(self._scope, self._receive, self._send)
            self._arrive(None)
        finally:
            self._host.exchanges.discard(self)

    async def _receive(self) -> Message:
        if self._content is not None:
            content, self._content = self._content, None
            return {"type": "http.request", "body": content, "more_body": False}
        await self._closed.wait()
        await self._host.reachable.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._host.reachable.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._arrive(b"")
        elif message.get("body"):
            self._arrive(message["body"])

    def _arrive(self, item: bytes | Exception | None) -> None:
        self._received.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def end(self, error: Exception | None) -> None:
        """The server has ended; ``error`` is what the client sees, nothing if it is None."""
        self._task.cancel()
        if error is not None:
            self._arrive(error)

    def break_off(self) -> None:
        """The client ends the connection, also while it waits for data."""
        self._arrive(ConnectionAbortedError("the server is down"))

    def close(self) -> None:
        """The client has closed the connection."""
        self._closed.set()

    async def next(self) -> bytes | None:
        """Return the next bytes; None at the end. Raises ``ConnectionBroken``."""
        if not self._received:
            loop = asyncio.get_running_loop()
            waiting = self._waiting = loop.create_future()
            timer = loop.call_later(self._silence, lambda: waiting.done() or waiting.set_result(None))
            try:
                await waiting
            finally:
                timer.cancel()
        if not self._received:
            raise ConnectionBroken(f"no data for {self._silence:g} s")
        item = self._received.popleft()
        if isinstance(item, Exception):
            raise ConnectionBroken(str(item))
        if item is not None:
            self._heard()
        return item

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self.next()) is not None:
            yield data


class _Client:
    """Replaces ``HttpClient``."""

    def __init__(
        self,
        host: SimulatedHost,
        headers: Mapping[str, str],
        connect: float,
        heard: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._host, self._connect, self._heard, self._rng = host, connect, heard, rng
        self._headers = dict(headers)
        self._exchanges: set[_Exchange] = set()
        self._connecting: set[asyncio.Future[Any]] = set()
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
    ) -> AsyncIterator[_Exchange]:
        host = self._host
        if not host.reachable.is_set():
            # The request is lost, whether it is sent on an open connection or a new one is opened.
            opened = not fresh and self._rng.random() < 0.5
            if not await self._wait(silence if opened else self._connect):
                raise ConnectionBroken("no data") if opened else ConnectFailed(TimeoutError("no connection"))
        if not host.listening:
            raise ConnectFailed(ConnectionRefusedError("connection refused"))
        fields = {**self._headers, **(headers or {}), "content-length": str(len(content))}
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": quote(path),
            "query_string": urlencode(query or {}).encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in fields.items()],
        }
        exchange = _Exchange(host, scope, content, silence, self._heard)
        self._exchanges.add(exchange)
        try:
            await exchange.next()
            yield exchange
        finally:
            self._exchanges.discard(exchange)
            exchange.close()

    async def _wait(self, timeout: float) -> bool:
        """Wait until the host can be reached; return whether that is so before ``timeout`` and ``abort``."""
        reachable = asyncio.ensure_future(self._host.reachable.wait())
        self._connecting.add(reachable)
        try:
            await asyncio.wait({reachable}, timeout=timeout)
            return self._host.reachable.is_set()
        finally:
            self._connecting.discard(reachable)
            reachable.cancel()

    def abort(self) -> None:
        for reachable in self._connecting:
            reachable.cancel()
        for exchange in self._exchanges:
            exchange.break_off()

    def close(self) -> None:
        self.closed = True
        self.abort()


class Cluster:
    """Hosts, and the network between them and their clients."""

    def __init__(self, hosts: int, limit: int, seed: int) -> None:
        self.hosts = [SimulatedHost(f"host-{number:03}", limit, seed + number) for number in range(hosts)]
        self._rng = random.Random(seed)

    async def start(self) -> None:
        for host in self.hosts:
            await host.start()

    async def stop(self) -> None:
        for host in self.hosts:
            if host.listening:
                await host.stop()

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Connect the clients that are made in the body to the hosts."""
        by_name = {host.name: host for host in self.hosts}

        def client(
            url: str, headers: Mapping[str, str], _: object, *, connect: float, idle: float, heard: Callable[[], None]
        ) -> _Client:
            name = urlsplit(url).hostname
            assert name is not None
            return _Client(by_name[name], headers, connect, heard, self._rng)

        with mock.patch.object(connection, "HttpClient", client):
            yield

    def backend(self) -> RemoteBackend:
        """Return a client of all hosts."""
        with self.network():
            backend = RemoteBackend([f"https://{host.name}" for host in self.hosts], TOKEN)
        backend._rng = self._rng  # else the same seed would not give the same course
        return backend
