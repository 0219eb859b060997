"""HTTP server for sandboxes: any back end of this machine, for clients that have the token.

Invariant: every request passes ``AdmissionControl`` (who, how much, how fast) and ``Policy`` (what) before it reaches a
back end. When a client cancels a call or disconnects, the call ends and everything that it started is killed; only a
command with an idempotency key continues. Without a certificate the server listens on loopback only.

``agentkit sandbox serve`` runs ``serve``; the client is ``agentkit.sandboxes.backends.remote``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

from agentkit.errors import (
    AccessDenied,
    ConfigError,
    EngineUnavailable,
    ProtocolError,
    QuotaExceeded,
    SandboxError,
)
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.channel import AgentChannel
from agentkit.sandboxes.agent.protocol import Kind
from agentkit.sandboxes.backend import Backend, Channel, Process
from agentkit.sandboxes.backends import backend as backend_named
from agentkit.sandboxes.pool.health import HostUsage, local_host
from agentkit.sandboxes.server.admission import AdmissionControl, Message, Receive, Send, http_protocol
from agentkit.sandboxes.server.auth import PORT, find_tokens, is_loopback
from agentkit.sandboxes.server.config import OPERATOR, ServerConfig, read_config
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.server.metrics import ERROR, ServerMetrics
from agentkit.sandboxes.server.policy import check_amount
from agentkit.sandboxes.server.protocol import (
    CALL_HEADER,
    CLIENT_HEADER,
    pack_error,
    pack_json,
    pack_result,
    unpack,
    unpack_arguments,
    unpack_request,
)
from agentkit.sandboxes.server.records import ServerRecords
from agentkit.sandboxes.server.sessions import SandboxSessions
from agentkit.sandboxes.server.state import ServerState
from agentkit.sandboxes.server.tenants import Operation, Tenants
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import tracked
from agentkit.sandboxes.types import ExecRequest

_log = logging.getLogger(__name__)

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than in the client, which so never uses one that just closed."""
_STOP_SECONDS = 3
KEEP_SECONDS = 120.0
"""Seconds for which sandboxes wait for the next process of their server."""


_ALWAYS = ("calls", "status", "drain", "boot")
"""Calls that are answered until the end."""

Cause = Callable[[Exception], Exception]
"""Returns the error that a client gets; see ``SandboxSessions.cause``."""


@dataclass(frozen=True)
class _Call:
    """A request. ``parts``: its path below ``/v1/``, split."""

    method: str
    parts: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    body: bytes
    receive: Receive

    def header(self, name: str) -> str:
        return self.headers.get(name.encode(), b"").decode("latin-1")

    def integer(self, name: str) -> int:
        """Return an integer of the query. Raises ``ProtocolError``."""
        try:
            return int(self.query[name])
        except (KeyError, ValueError):
            raise ProtocolError(f"the query needs an integer {name}") from None


@dataclass(frozen=True)
class _Stream:
    """A response that is sent in chunks, at the client's pace; ``close`` is called once, however it ends."""

    chunks: AsyncGenerator[bytes, None]
    close: Callable[[], None] = lambda: None


class SandboxApp:
    """The methods of ``Backend`` and ``Channel`` for one tenant, as an application for ``AdmissionControl``.

    Requests are dispatched with ``match``, because the routing of a framework takes longer than a short command.
    """

    def __init__(self, sessions: SandboxSessions, operation: Operation | None) -> None:
        self._sessions = sessions
        self._operation = operation
        self._processes: dict[str, Process] = {}
        self._run_id = secrets.token_hex(4)
        """Distinguishes the commands of this process of the server from those of earlier ones."""

    async def __call__(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        parts = tuple(scope["path"].removeprefix("/v1/").split("/"))
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        try:
            call = _Call(scope["method"], parts, query, dict(scope["headers"]), body, receive)
            response, status = await self._dispatch(call), 200
        except Exception as error:
            error = self._sessions.cause(error)
            response, status = pack_error(error), _status(error)
            scope[ERROR] = type(error).__name__
        if isinstance(response, _Stream):
            await _send_stream(response, receive, send)
            return
        try:
            with self._sessions.buffered(len(response)):
                await _send_in_time(send, status, response, self._sessions.quota.transfer_seconds(len(response)))
        except QuotaExceeded as error:
            await _send(send, _status(error), pack_error(error))

    async def _dispatch(self, call: _Call) -> bytes | _Stream:
        if call.parts[0] not in _ALWAYS:
            self._sessions.check_accepting()
        match call.method, *call.parts:
            case "POST", "channels", key, verb:
                return await self._channel_call(call, key, verb)
            case "POST", "processes", handle, verb:
                await self._process_call(call, handle, verb)
            case _, "sandboxes", *_:
                return await self._sandbox_call(call)
            case "GET", "boot":
                return self._sessions.boot.encode()
            case "POST", "stream":
                stream = self._sessions.subscribe(call.header(CLIENT_HEADER), unpack(list[str], call.body))
                return _Stream(stream.lines(), lambda: self._sessions.unsubscribe(stream))
            case "POST", "list":
                return pack_json(await self._sessions.list(unpack(dict[str, str], call.body)))
            case "GET", "status":
                return pack_json(self._operation.status() if self._operation else self._sessions.report())
            case "POST", "drain":
                if self._operation is None:
                    raise AccessDenied("only the operator's token may drain the server")
                self._operation.drain(unpack(bool, call.body))
            case "POST", "pull":
                body = unpack(dict[str, Any], call.body)
                image, refresh = unpack(str, pack_json(body.get("image"))), unpack(bool, pack_json(body.get("refresh")))
                timeout = unpack(float, pack_json(body.get("timeout")))
                return pack_json(await self._run(call, self._sessions.pull(image, timeout, refresh)))
            case "DELETE", "calls", name:
                await self._sessions.calls.cancel(name)
            case "DELETE", "snapshots", name:
                await self._sessions.discard(name)
            case _:
                raise _unknown(call)
        return b""

    async def _sandbox_call(self, call: _Call) -> bytes:
        sessions, backend, client = self._sessions, self._sessions.backend, call.header(CLIENT_HEADER)
        match call.method, *call.parts[1:]:
            case "PUT", id:
                body = unpack(dict[str, Any], call.body)
                spec = unpack(SandboxSpec, pack_json(body.get("spec")))
                labels = unpack(dict[str, str], pack_json(body.get("labels")))
                return sessions.describe(await self._run(call, sessions.create(id, spec, labels, client)))
            case "DELETE", id:
                await sessions.remove(id)
            case "GET", id:
                return pack_json(await sessions.inspect(id))
            case "GET", id, "logs":
                return await backend.logs(sessions.session(id).id, call.integer("tail"))
            case "POST", id, "attach":
                return sessions.describe(await self._run(call, sessions.attach(id, client)))
            case "POST", id, "restart":
                return sessions.describe(await self._run(call, sessions.restart(id, client)))
            case "POST", id, "snapshot":
                return pack_json(await self._run(call, sessions.snapshot(id, client)))
            case "POST", id, "restore":
                await self._run(call, sessions.restore(id, unpack(str, call.body)))
            case "POST", id, "extend":
                await sessions.extend(id, unpack(float | None, call.body))
            case "POST", id, "pause":
                await self._run(call, backend.pause(sessions.session(id).id))
            case "POST", id, "resume":
                await self._run(call, backend.resume(sessions.session(id).id))
            case _:
                raise _unknown(call)
        return b""

    async def _channel_call(self, call: _Call, key: str, verb: str) -> bytes | _Stream:
        if verb in ("exec", "spawn"):
            request = unpack_request(call.body)
            check_amount(self._sessions.policy, "output", request.output_limit)
            channel = await self._sessions.channel(key)
            if verb == "spawn":
                return self._process_stream(await self._run(call, self._spawn(channel, request)))
            detached = request.idempotency_key is not None
            result = await self._run(call, channel.exec(request), detached=detached)
            self._sessions.note(key, result)
            return pack_result(result)
        if verb == "resume":
            channel = await self._sessions.channel(key)
            if not isinstance(channel, AgentChannel):
                raise _unknown(call)
            received = (call.integer("stdout"), call.integer("stderr"))
            resumed = await self._run(call, channel.resume(unpack_request(call.body), received))
            return self._process_stream(*resumed)
        path, number, data = unpack_arguments(call.body)
        channel = await self._sessions.channel(key)
        match verb:
            case "read":
                check_amount(self._sessions.policy, "file", number)
                return _Stream(_file_frames(channel, path, int(number), self._sessions.cause))
            case "write":
                work = channel.write(path, data, int(number))
            case "list":
                work = channel.list(path)
            case "stat":
                work = channel.stat(path)
            case "remove":
                work = channel.remove(path)
            case "mkdir":
                work = channel.mkdir(path)
            case "stats":
                work = channel.stats()
            case "ping":
                work = channel.ping(number)
            case _:
                raise _unknown(call)
        return pack_json(await self._run(call, work))

    async def _spawn(self, channel: Channel, request: ExecRequest) -> Process:
        if request.idempotency_key is not None and isinstance(channel, AgentChannel):
            return await channel.spawn(request, linger=self._sessions.linger(channel))
        return await channel.spawn(request)

    def _process_stream(self, process: Process, taken: int = 0) -> _Stream:
        """Return the stream of a running command. ``taken``: bytes of input that it has taken."""
        handle = f"{self._run_id}-{paths.new_id()}"
        self._processes[handle] = process

        def close() -> None:
            del self._processes[handle]
            self._sessions.background(_kill(process))

        return _Stream(_process_frames(f"{handle} {taken}", process, self._sessions.cause), close)

    async def _process_call(self, call: _Call, handle: str, verb: str) -> None:
        process = self._processes.get(handle)
        if verb not in ("input", "end", "kill"):
            raise _unknown(call)
        if process is None and not handle.startswith(self._run_id):
            error = EngineUnavailable("the sandbox server was restarted; resume the command", resume=True)
            error.side_effects = "maybe"  # not to be sent again
            raise error
        if process is None:
            if verb == "input":
                raise BrokenPipeError("the command has ended")
        elif verb == "input":
            await self._run(call, process.write(call.body))
        elif verb == "end":
            await process.close_stdin()
        else:
            await process.kill(call.integer("number"))

    async def _run(self, call: _Call, work: Coroutine[Any, Any, Any], *, detached: bool = False) -> Any:
        disconnected = None if detached else _disconnected(call.receive)
        return await self._sessions.calls.run(call.header(CALL_HEADER) or paths.new_id(), work, disconnected)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _process_frames(started: str, process: Process, cause: Cause) -> AsyncGenerator[bytes, None]:
    """Yield a running command as frames: its handle and the input that it has taken, its output and its result."""
    yield protocol.encode(Kind.STARTED, 0, started.encode())
    try:
        async for stream, data in process:
            kind = Kind.OUTPUT if stream == "stdout" else Kind.ERRORS
            for piece in _pieces(data):
                yield protocol.encode(kind, 0, piece)
        yield protocol.encode(Kind.DONE, 0, pack_result(await process.wait()))
    except Exception as error:
        yield protocol.encode(Kind.FAIL, 0, pack_error(cause(error))[: protocol.MAX_PAYLOAD])


async def _file_frames(channel: Channel, path: str, limit: int, cause: Cause) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file as frames, then whether it is complete."""
    try:
        async with contextlib.aclosing(channel.stream(path, limit)) as content:
            async for data in content:
                for piece in _pieces(data):
                    yield protocol.encode(Kind.OUTPUT, 0, piece)
        yield protocol.encode(Kind.DONE, 0)
    except Exception as error:
        yield protocol.encode(Kind.FAIL, 0, pack_error(cause(error))[: protocol.MAX_PAYLOAD])


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + protocol.CHUNK] for start in range(0, len(data), protocol.CHUNK))


async def _kill(process: Process) -> None:
    with contextlib.suppress(SandboxError, OSError):
        await process.kill(9)


def _unknown(call: _Call) -> ProtocolError:
    return ProtocolError(f"unknown call {call.method} {'/'.join(call.parts)!r}")


def _status(error: Exception) -> int:
    if isinstance(error, ProtocolError):
        return 400
    if isinstance(error, SandboxError | BrokenPipeError | asyncio.TimeoutError):
        return 409
    _log.error("a call failed: %s: %s", type(error).__name__, error, exc_info=error)
    return 500


async def _send_in_time(send: Send, status: int, payload: bytes, seconds: float) -> None:
    try:
        # A short payload fits into the buffer of the transport.
        await asyncio.wait_for(_send(send, status, payload), seconds if len(payload) > protocol.CHUNK else None)
    except asyncio.TimeoutError:
        _log.warning("a client did not read a response of %d bytes in %.0f s", len(payload), seconds)


async def _send(send: Send, status: int, payload: bytes) -> None:
    """Send a response in pieces; each waits until the client has read the previous ones."""
    headers = [(b"content-length", str(len(payload)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for start in range(0, max(len(payload), 1), protocol.CHUNK):
        end = start + protocol.CHUNK
        await send({"type": "http.response.body", "body": payload[start:end], "more_body": end < len(payload)})


async def _send_stream(stream: _Stream, receive: Receive, send: Send) -> None:
    tasks = {asyncio.ensure_future(_send_chunks(stream.chunks, send)), asyncio.ensure_future(_disconnected(receive))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        stream.close()
        await asyncio.wait(tasks)


async def _send_chunks(chunks: AsyncGenerator[bytes, None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"no-store")]})
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class SandboxServer:
    """A sandbox server in the running event loop: ``async with SandboxServer(backend, token=…) as server``.

    Attributes:
        url: the address of the server.
        tenants: its tenants.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        token: str | Sequence[str],
        host: str = "127.0.0.1",
        port: int = 0,
        config: ServerConfig | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        measure: Callable[[], HostUsage] | None = None,
        state: ServerState | None = None,
    ) -> None:
        """Bind the address.

        Args:
            backend: where sandboxes are created; the server starts and closes it.
            token: the token, or the tokens, that clients must send; the operator's if there are tenants.
            host: the address to listen on.
            port: the port; 0 chooses a free one.
            config: what clients may do; by default nothing that weakens a sandbox.
            certificate: path of a TLS certificate.
            key: path of the key of the certificate.
            measure: returns the use of this machine; by default it is measured.
            state: the saved sandboxes, for the next process of this server; None: sandboxes end with this process.

        Raises:
            ConfigError: the address is in use, or other machines can reach it and there is no certificate and key.
        """
        secure = certificate is not None and key is not None
        if not secure and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give a TLS certificate and its key, or listen on 127.0.0.1"
            )
        config = config or ServerConfig()
        machine = Host(config.watermarks.shares(), measure or (lambda: local_host(backend.storage)))
        self.tenants = Tenants(backend, machine, SandboxApp, state)
        self._config, self._tokens = config, (token,) if isinstance(token, str) else token
        self.keep = False
        """Leave the sandboxes to the next process of the server at the end."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
            # Accepted connections inherit the option. asyncio sets it only on sockets that name their protocol, which
            # these do not; without it each small response waits for the client's delayed acknowledgement.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        address = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if secure else 'http'}://{address}:{self._socket.getsockname()[1]}"
        measured = ServerMetrics(AdmissionControl(self.tenants), self.tenants, backend)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                measured,  # pyright: ignore[reportArgumentType]
                http=http_protocol(config.quota.header_seconds),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=2 * config.quota.requests,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_STOP_SECONDS,
                ssl_certfile=certificate,
                ssl_keyfile=None if key is None else str(key),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def sessions(self) -> SandboxSessions:
        """The sandboxes of the operator's token, which is the only one without tenants."""
        return self.tenants[OPERATOR].sessions

    async def __aenter__(self) -> SandboxServer:
        try:
            await self.tenants.start(self._config, self._tokens)
        except BaseException:
            self._socket.close()
            raise
        self._serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        await self.tenants.stop(keep=self.keep)
        self._uvicorn.should_exit = True
        await asyncio.wait({self._serving})
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that uses the server."""
        yield


def serve(
    backend: str | Backend = "docker",
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_file: str | Path | None = None,
    config: str | Path | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    name: str = "",
    keep: float = KEEP_SECONDS,
    records: str | Path | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve sandboxes until SIGINT or SIGTERM.

    SIGINT removes all sandboxes. After SIGTERM, or the death of the process, they are kept for ``keep`` seconds: a
    server of the same name that starts within this time adopts them.

    SIGHUP reads ``config`` and all tokens again; sandboxes continue.

    Args:
        backend: name of the back end, or an instance, in which sandboxes are created.
        host: the address to listen on; other addresses than loopback need a certificate.
        port: the port; 0 chooses a free one.
        token_file: a file that contains the token; by default the token is looked up as in ``find_token``, and created
            in this user's runtime directory if there is none.
        config: a file of a ``ServerConfig``, in YAML.
        certificate: path of a TLS certificate.
        key: path of the key of the certificate.
        name: name of the server, unique for this user on this machine. Default: the back end and the port. A server on
            port 0 without a name keeps nothing.
        keep: seconds for which sandboxes wait for the next process of the server; 0: they end with this one.
        records: a folder in which the server records its sandboxes and what happens to them, for `agentkit dashboard`.
        announce: called with the URL once the server accepts requests.

    Raises:
        ConfigError: the address, the token, the configuration, the folder of the records or the name of the back end is
            not usable, or a server of this name runs.
        EngineUnavailable: the back end cannot be started.
    """

    def settings() -> tuple[ServerConfig, Sequence[str]]:
        return ServerConfig() if config is None else read_config(config), find_tokens(token_file, make=True)

    rules, tokens = settings()

    async def reload(server: SandboxServer) -> None:
        try:
            await server.tenants.configure(*settings())
        except ConfigError as error:
            _log.error("the configuration stays as it was: %s", error)

    async def main() -> None:
        received: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, _receive, received, number)
        chosen = backend_named(backend)
        state = _state(chosen, name or (f"{chosen.name}-{port}" if port else ""), keep)
        server = SandboxServer(
            chosen,
            token=tokens,
            host=host,
            port=port,
            config=rules,
            certificate=certificate,
            key=key,
            state=state,
        )
        async with contextlib.AsyncExitStack() as stack:
            if records is not None:
                recorder = ServerRecords(Path(records), server.url, chosen, server.tenants)
                await stack.enter_async_context(recorder)
            await stack.enter_async_context(server)
            announce(server.url)
            loop, reloads = asyncio.get_running_loop(), set[asyncio.Task[None]]()
            loop.add_signal_handler(signal.SIGHUP, lambda: tracked(reload(server), reloads))
            server.keep = await received == signal.SIGTERM and state is not None

    asyncio.run(main())


def _receive(received: asyncio.Future[int], number: int) -> None:
    if not received.done():
        received.set_result(number)


def _state(backend: Backend, name: str, keep: float) -> ServerState | None:
    """Return the files for the next process of a server; None if its sandboxes end with this process."""
    return ServerState(name, keep) if name and keep and backend.recipe() is not None else None
