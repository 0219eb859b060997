"""The HTTP proxy on the host for sandboxes with an allow-list; the sandbox reaches it over its agent's channel only.

Invariant: the sandbox has no network interface. A name is resolved once per connection, and the proxy connects to an
address that was checked after the resolution. A connection carries one request or one tunnel. Every wait has a timeout,
connections end with the channel, and refused requests are answered with 403 and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkit.sandboxes.egress.allowlist import Address, AllowList, plain
from agentkit.sandboxes.egress.client import ClientReader
from agentkit.sandboxes.egress.dns import look_up
from agentkit.sandboxes.egress.forward import Forwarder
from agentkit.sandboxes.egress.relays import RelayedStream, Source, serve
from agentkit.sandboxes.egress.requests import Refused, Request
from agentkit.sandboxes.spec import Network, SandboxSpec
from agentkit.sandboxes.tasks import begin, bounded, retrieve, stopped, tracked

if TYPE_CHECKING:
    from agentkit.sandboxes.agent.channel import AgentChannel

PORT = 3128
"""Port inside the sandbox, on 127.0.0.1, whose connections are relayed to the host."""

_LOG = logging.getLogger(__name__)
_PIECE = 1 << 16
_ATTEMPTS = 4
"""Addresses of one name that are tried."""
_LOOKUPS = 2
"""Names of one sandbox that are looked up at once."""

Resolver = Callable[[str, int], Coroutine[Any, Any, list[Address]]]
"""Resolves a name and port to addresses. Raises ``OSError``."""


@dataclass(frozen=True)
class ProxyLimits:
    """Limits of one sandbox. Seconds and bytes."""

    connections: int = 64
    head_timeout: float = 10.0
    """Until the head of a request is complete."""
    connect_timeout: float = 15.0
    """Until the name is resolved and the server has accepted the connection."""
    idle_timeout: float = 120.0
    """Without a byte in either direction."""
    linger: float = 20.0
    """Until a client that received everything must have closed."""
    total: int = 16 << 30
    """Transferred by all connections of a channel, both directions together."""


class EgressProxy:
    """The proxy of one sandbox; use ``start``.

    Args:
        network: the allow-list.
        limits: limits of this sandbox.
        resolve: resolver of names; tests pass another.
    """

    def __init__(self, network: Network, *, limits: ProxyLimits | None = None, resolve: Resolver | None = None) -> None:
        self._allow = AllowList(network.domains, network.cidrs)
        self._limits = limits or ProxyLimits()
        self._resolve = resolve or look_up
        self._lookup_slots = asyncio.Semaphore(_LOOKUPS)
        self._lookups: set[asyncio.Task[list[Address]]] = set()
        self._open = 0
        self.transferred = 0
        """Bytes of bodies and tunnels, both directions."""
        self.served = 0
        self.refused: Counter[str] = Counter()
        """Refused requests by reason."""
        self.failed = 0
        """Allowed requests whose server could not be reached."""

    async def serve(self, source: Source) -> None:
        """Serve the connections of ``source`` until it ends or the caller is cancelled; then close all."""
        try:
            await serve(source, self._connection)
        finally:
            for lookup in self._lookups:
                lookup.cancel()

    async def _connection(self, stream: RelayedStream) -> None:
        self._open += 1
        try:
            await self._handle(stream)
        finally:
            self._open -= 1

    async def _handle(self, stream: RelayedStream) -> None:
        client = ClientReader(stream)
        try:
            self._check_quota()
            request = await self._head(client)
            if request.head is not None and request.length == 0 and client.rest:
                raise Refused("pipelined", "only one request per connection is allowed")
            upstream = await self._upstream(request)
        except Refused as error:
            self.refused[error.kind] += 1
            _LOG.info("egress refused: %s", error)
            await self._answer(client, "403 Forbidden", str(error))
        except _Unreachable as error:
            self.failed += 1
            await self._answer(client, "502 Bad Gateway", str(error))
        else:
            self.served += 1
            await self._transfer(client, request, *upstream)

    async def _head(self, client: ClientReader) -> Request:
        seconds = self._limits.head_timeout
        try:
            return await bounded(client.head(), seconds)
        except asyncio.TimeoutError:
            raise Refused("slow", f"the head of the request took longer than {seconds:g} s") from None

    def _check_quota(self) -> None:
        if self._open > self._limits.connections:
            raise Refused("connections", f"more than {self._limits.connections} connections at once")
        if self.transferred >= self._limits.total:
            raise Refused("total", f"this sandbox has transferred its {self._limits.total} bytes")

    async def _answer(self, client: ClientReader, status: str, reason: str) -> None:
        body = f"agentkit: {reason}\n".encode("ascii", "replace")
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await bounded(client.stream.write(head.encode() + body), self._limits.linger)
        client.stream.end()
        await client.wait_closed(self._limits.linger)

    # Connecting

    async def _upstream(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the server of the request. Raises ``Refused``, ``_Unreachable``."""
        seconds = self._limits.connect_timeout
        try:
            return await bounded(self._connect(request), seconds, lambda streams: streams[1].transport.abort())
        except asyncio.TimeoutError:
            raise _Unreachable(f"{request.target} did not answer within {seconds:g} s") from None
        except OSError as error:
            raise _Unreachable(f"{request.target} cannot be reached: {error.strerror or error}") from error

    async def _connect(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        problem: OSError = OSError(0, "the name has no address")
        for address in (await self._addresses(request))[:_ATTEMPTS]:
            try:
                # an address: nothing is resolved again
                return await asyncio.open_connection(str(address), request.port, limit=_PIECE)
            except OSError as error:
                problem = error
        raise problem

    async def _addresses(self, request: Request) -> list[Address]:
        """Return the addresses that the request may use. Raises ``Refused``, ``OSError``."""
        host, port = request.host, request.port
        if not isinstance(host, str):
            if not self._allow.lists(host, port):
                raise Refused("unlisted", f"{request.target} is not on the allow-list of this sandbox")
            return [host]
        if not self._allow.names(host, port):
            raise Refused("unlisted", f"{request.target} is not on the allow-list of this sandbox")
        found = [plain(address) for address in await self._look_up(host, port)]
        for address in found:
            # One private address among public ones is an attack, not an error of the resolver.
            if not self._allow.opens(address, port):
                raise Refused(
                    "private", f"{host} resolves to an address that is not public; list its range in cidrs to allow it"
                )
        return found

    async def _look_up(self, host: str, port: int) -> list[Address]:
        await self._lookup_slots.acquire()
        # A lookup may hang after its caller has given up; it counts until it ends.
        lookup = begin(self._resolve(host, port), self._lookups, lambda _: self._lookup_slots.release())
        return await asyncio.shield(lookup)

    # Transferring

    async def _transfer(
        self, client: ClientReader, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        clock = _Clock()
        if request.head is None:
            out = self._send_tunnel(client, writer, clock)
        else:
            out = self._send_request(client, request, writer, clock)
        tasks = [asyncio.ensure_future(out), asyncio.ensure_future(self._receive(client, request, reader, clock))]
        for task in tasks:
            task.add_done_callback(retrieve)
        try:
            while not tasks[1].done() or (request.head is None and not tasks[0].done()):
                left = self._limits.idle_timeout - clock.idle()
                if left <= 0:
                    return
                running = [task for task in tasks if not task.done()]
                done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await stopped(tasks)
            writer.transport.abort()
        if request.head is not None:
            await client.wait_closed(self._limits.linger)

    async def _send_tunnel(self, client: ClientReader, writer: asyncio.StreamWriter, clock: _Clock) -> None:
        while data := await client.read():
            await self._send(writer, data, clock)
        writer.write_eof()

    async def _send_request(
        self, client: ClientReader, request: Request, writer: asyncio.StreamWriter, clock: _Clock
    ) -> None:
        assert request.head is not None
        writer.write(request.head)
        async for data in client.chunks() if request.length is None else client.exactly(request.length):
            await self._send(writer, data, clock)
        if await client.read():
            self.refused["pipelined"] += 1
            raise ConnectionAbortedError("more than one request on a connection")

    async def _receive(
        self, client: ClientReader, request: Request, reader: asyncio.StreamReader, clock: _Clock
    ) -> None:
        if request.head is None:
            await client.stream.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        while data := await reader.read(_PIECE):
            self._count(len(data), clock)
            await client.stream.write(data)
            clock.tick()
        client.stream.end()

    async def _send(self, writer: asyncio.StreamWriter, data: bytes, clock: _Clock) -> None:
        self._count(len(data), clock)
        writer.write(data)
        await writer.drain()
        clock.tick()

    def _count(self, count: int, clock: _Clock) -> None:
        clock.tick()
        self.transferred += count
        if self.transferred > self._limits.total:
            self.refused["total"] += 1
            raise ConnectionAbortedError("this sandbox has reached its transfer limit")


class _Clock:
    """Time since the last transfer in either direction."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self.tick()

    def tick(self) -> None:
        self._last = self._now()

    def idle(self) -> float:
        return self._now() - self._last


class _Unreachable(Exception):
    """The server of an allowed request does not answer."""


_serving: set[asyncio.Task[None]] = set()


def start(channel: AgentChannel, network: Network) -> None:
    """Start what serves the relay port of a sandbox, if its network has one; it ends with ``channel``."""
    if network.mode == "allow":
        proxy = EgressProxy(network)
        channel.egress = proxy  # pyright: ignore[reportAttributeAccessIssue]  # one class seen under two paths
        tracked(proxy.serve(channel), _serving)
    elif network.address is not None:
        tracked(Forwarder(network.address).serve(channel), _serving)


def relay_port(spec: SandboxSpec) -> int | None:
    """Return the port that the agent listens on in the sandbox, or None."""
    return PORT if spec.network.mode in ("allow", "forward") else None


def environment(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment variables of every command: those of ``spec`` and the proxy's.

    Requests to ``localhost`` stay in the sandbox.
    """
    if spec.network.mode != "allow":
        return dict(spec.env)
    proxy, direct = f"http://127.0.0.1:{PORT}", "localhost,127.0.0.1,::1"
    names = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": direct}
    return {**names, **{name.upper(): value for name, value in names.items()}, **spec.env}
