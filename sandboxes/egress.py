"""The way out of a sandbox whose network has an allow-list: an HTTP proxy on the host, reached only over its channel.

Invariant: the sandbox has no network of its own; whatever leaves it goes through here, to an address that was checked
after the name had been looked up, and to no other: a name is looked up once for each connection, and connected to is
what came of that. A connection carries one request, or one tunnel. Nothing waits without a bound, nothing outlives the
channel, and what is refused is answered (403, one line) and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agentkit.errors import SandboxLost
from agentkit.sandboxes.allowlist import Address, AllowList, plain
from agentkit.sandboxes.lookup import look_up
from agentkit.sandboxes.proxy_client import Client, RelayedStream
from agentkit.sandboxes.proxy_request import Refused, Request
from agentkit.sandboxes.spec import Network, SandboxSpec

if TYPE_CHECKING:
    from agentkit.sandboxes.agent_channel import AgentChannel

T = TypeVar("T")

PORT = 3128
"""Where the proxy is found inside, on 127.0.0.1."""

_LOG = logging.getLogger(__name__)
_PIECE = 1 << 16
_ATTEMPTS = 4
"""Addresses of one name that are tried."""
_LOOKUPS = 2
"""Names of one sandbox that are looked up at once."""

Resolver = Callable[[str, int], Coroutine[Any, Any, list[Address]]]
"""The addresses of a name. Raises ``OSError``."""


class Source(Protocol):
    """What the proxy needs of a channel; ``AgentChannel`` is one."""

    def relays(self) -> AsyncIterator[RelayedStream]: ...


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use of the proxy. Seconds and bytes."""

    connections: int = 64
    head_timeout: float = 10.0
    """Until the head of a request is there."""
    connect_timeout: float = 15.0
    """Until the name is looked up and the server has accepted."""
    idle_timeout: float = 120.0
    """Without a byte in either direction."""
    linger: float = 20.0
    """Until a client that got everything must have closed."""
    total: int = 16 << 30
    """Both directions of all connections together, as long as the channel lives."""


class Egress:
    """The proxy of one sandbox. ``start`` begins it; tests give their own ``resolve``."""

    def __init__(self, network: Network, *, limits: Limits | None = None, resolve: Resolver | None = None) -> None:
        self._allow = AllowList(network.domains, network.cidrs)
        self._limits = limits or Limits()
        self._resolve = resolve or look_up
        self._looking = asyncio.Semaphore(_LOOKUPS)
        self._lookups: set[asyncio.Future[list[Address]]] = set()
        self._open = 0
        self.transferred = 0
        """Bytes of bodies and tunnels, both directions."""
        self.served = 0
        self.refused: Counter[str] = Counter()
        """Requests that were not carried out, by reason."""
        self.failed = 0
        """Requests that were allowed and whose server could not be reached."""

    async def serve(self, source: Source) -> None:
        """Serve the connections of ``source`` until it ends; then, or when cancelled, all of them are closed."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            with contextlib.suppress(SandboxLost):
                async for stream in source.relays():
                    task = asyncio.ensure_future(self._connection(stream))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            for task in (*tasks, *self._lookups):
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _connection(self, stream: RelayedStream) -> None:
        self._open += 1
        try:
            await self._handle(stream)
        except (SandboxLost, OSError, asyncio.TimeoutError):
            pass  # One side has gone; so does the other.
        except Exception:
            _LOG.exception("egress: a connection failed")
        finally:
            self._open -= 1
            stream.close()

    async def _handle(self, stream: RelayedStream) -> None:
        client = Client(stream)
        try:
            self._check_quota()
            slow = Refused("slow", f"the head of the request took longer than {self._limits.head_timeout:g} s")
            request = await _within(client.head(), self._limits.head_timeout, slow)
            if request.head is not None and request.length == 0 and client.rest:
                raise Refused("pipelined", "one request a connection: more came with it")
            upstream = await self._reach(request)
        except Refused as error:
            self.refused[error.kind] += 1
            _LOG.info("egress refused: %s", error)
            await self._answer(client, "403 Forbidden", str(error))
        except _Unreachable as error:
            self.failed += 1
            await self._answer(client, "502 Bad Gateway", str(error))
        else:
            self.served += 1
            await self._carry(client, request, *upstream)

    def _check_quota(self) -> None:
        if self._open > self._limits.connections:
            raise Refused("connections", f"more than {self._limits.connections} connections at once")
        if self.transferred >= self._limits.total:
            raise Refused("total", f"this sandbox has transferred its {self._limits.total} bytes")

    async def _answer(self, client: Client, status: str, reason: str) -> None:
        body = f"agentkit: {reason}\n".encode("ascii", "replace")
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        await _within(client.stream.write(head.encode() + body), self._limits.linger, asyncio.TimeoutError())
        client.stream.end()
        await client.gone(self._limits.linger)

    # Whereto

    async def _reach(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to where the request may go. Raises ``Refused``, ``_Unreachable``."""
        seconds = self._limits.connect_timeout
        try:
            return await _within(
                self._connect(request),
                seconds,
                _Unreachable(f"{request.target} did not answer within {seconds:g} s"),
                unwanted=lambda streams: streams[1].transport.abort(),
            )
        except OSError as error:
            raise _Unreachable(f"{request.target} cannot be reached: {error.strerror or error}") from error

    async def _connect(self, request: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        problem: OSError = OSError(0, "the name has no address")
        for address in (await self._addresses(request))[:_ATTEMPTS]:
            try:
                # An address, so that nothing is looked up again.
                return await asyncio.open_connection(str(address), request.port, limit=_PIECE)
            except OSError as error:
                problem = error
        raise problem

    async def _addresses(self, request: Request) -> list[Address]:
        """Where the request may go. Raises ``Refused``, ``OSError``."""
        host, port = request.host, request.port
        if not isinstance(host, str):
            if not self._allow.lists(host, port):
                raise Refused("unlisted", f"{request.target} is not on the allow-list of this sandbox")
            return [host]
        if not self._allow.names(host, port):
            raise Refused("unlisted", f"{request.target} is not on the allow-list of this sandbox")
        found = [plain(address) for address in await self._look_up(host, port)]
        for address in found:
            # One bad address among good ones is no mistake that a resolver makes.
            if not self._allow.opens(address, port):
                raise Refused("private", f"{host} leads to an address that is not public; a listed range can open it")
        return found

    async def _look_up(self, host: str, port: int) -> list[Address]:
        await self._looking.acquire()
        # It may hang long after its caller has given up, and counts as long as it does.
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._looked_up)
        return await asyncio.shield(lookup)

    def _looked_up(self, lookup: asyncio.Future[list[Address]]) -> None:
        self._lookups.discard(lookup)
        self._looking.release()
        if not lookup.cancelled():
            lookup.exception()

    # There and back

    async def _carry(
        self, client: Client, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        clock = _Clock()
        if request.head is None:
            out = self._tunnel_out(client, writer, clock)
        else:
            out = self._request_out(client, request, writer, clock)
        tasks = [asyncio.ensure_future(out), asyncio.ensure_future(self._back(client, request, reader, clock))]
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
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()
            writer.transport.abort()
        if request.head is not None:
            await client.gone(self._limits.linger)

    async def _tunnel_out(self, client: Client, writer: asyncio.StreamWriter, clock: _Clock) -> None:
        while data := await client.some():
            await self._send(writer, data, clock)
        writer.write_eof()

    async def _request_out(self, client: Client, request: Request, writer: asyncio.StreamWriter, clock: _Clock) -> None:
        assert request.head is not None
        writer.write(request.head)
        async for data in client.chunks() if request.length is None else client.exactly(request.length):
            await self._send(writer, data, clock)
        if await client.some():
            self.refused["pipelined"] += 1
            raise ConnectionAbortedError("more than one request on a connection")

    async def _back(self, client: Client, request: Request, reader: asyncio.StreamReader, clock: _Clock) -> None:
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
            raise ConnectionAbortedError("this sandbox has transferred all that it may")


class _Clock:
    """When something last moved, in either direction."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self.tick()

    def tick(self) -> None:
        self._last = self._now()

    def idle(self) -> float:
        return self._now() - self._last


class _Unreachable(Exception):
    """A request was allowed, but its server does not answer."""


async def _within(
    work: Coroutine[Any, Any, T], seconds: float, error: Exception, unwanted: Callable[[T], None] = lambda _: None
) -> T:
    """The result of ``work``, or ``error`` after ``seconds``. ``unwanted`` gets a result that comes too late."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
        raise error
    except BaseException:
        task.cancel()
        task.add_done_callback(lambda task: _drop(task, unwanted))
        raise


def _drop(task: asyncio.Future[T], unwanted: Callable[[T], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        unwanted(task.result())


_serving: set[asyncio.Task[None]] = set()


def start(channel: AgentChannel, network: Network) -> None:
    """Serve the connections out of a sandbox as long as ``channel`` lives, if its network has an allow-list."""
    if network.mode == "allow":
        proxy = Egress(network)
        channel.egress = proxy  # pyright: ignore[reportAttributeAccessIssue]  # one class seen under two paths
        task = asyncio.ensure_future(proxy.serve(channel))
        _serving.add(task)  # The loop itself does not keep it.
        task.add_done_callback(_serving.discard)


def relay_port(spec: SandboxSpec) -> int | None:
    """The port that the agent has to listen on inside."""
    return PORT if spec.network.mode == "allow" else None


def environment(spec: SandboxSpec) -> dict[str, str]:
    """The variables of every command: those of ``spec``, and those by which programs find the proxy.

    What a program asks of ``localhost`` stays in the sandbox.
    """
    if spec.network.mode != "allow":
        return dict(spec.env)
    proxy, direct = f"http://127.0.0.1:{PORT}", "localhost,127.0.0.1,::1"
    names = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": direct}
    return {**names, **{name.upper(): value for name, value in names.items()}, **spec.env}
