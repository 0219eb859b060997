"""A server of sandboxes: any back end of this machine, over HTTP, for those who have its token.

Invariant: what a client sends has passed the ``Gate`` (who, how much, how fast) and the ``Policy`` (what) before a
back end hears of it. A call ends when its caller withdraws it or leaves, and what it had started is killed then; only
a command with an idempotency key runs on. The server listens on loopback alone unless it has a certificate.

``agentkit sandbox serve`` is ``serve``; ``agentkit.sandboxes.backends.remote`` is the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

from agentkit.errors import ConfigError, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes import wire
from agentkit.sandboxes.backend import Backend, Channel, Process
from agentkit.sandboxes.backends import backend as backend_named
from agentkit.sandboxes.calls import new_id
from agentkit.sandboxes.remote_protocol import (
    CALL,
    CLIENT,
    About,
    pack_error,
    pack_json,
    pack_result,
    unpack,
    unpack_request,
)
from agentkit.sandboxes.server_access import PORT, find_token, is_loopback
from agentkit.sandboxes.server_desk import Box, Desk
from agentkit.sandboxes.server_gate import App, Gate, Message, Receive, Send, impatient
from agentkit.sandboxes.server_policy import Limits, Policy, check_amount
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.wire import Kind

_log = logging.getLogger(__name__)

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep it, so that none uses one that just closed."""
_STOP_SECONDS = 3


@dataclass(frozen=True)
class _Call:
    """One request. ``parts``: its path after ``/v1/``."""

    method: str
    parts: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    body: bytes
    receive: Receive

    @property
    def client(self) -> str:
        return self.headers.get(CLIENT.encode(), b"").decode("latin-1")

    def number(self, name: str) -> int:
        """An integer of the query. Raises ``ProtocolError``."""
        try:
            return int(self.query[name])
        except (KeyError, ValueError):
            raise ProtocolError(f"the query needs a number {name}") from None


@dataclass(frozen=True)
class _Stream:
    """An answer that is sent as it comes, at the reader's pace; ``ended`` is called once, however it ends."""

    chunks: AsyncGenerator[bytes, None]
    ended: Callable[[], None]


_Answer = bytes | _Stream


def application(desk: Desk) -> App:
    """The calls of ``Backend`` and ``Channel`` as paths, for ``Gate``: plain functions, since a framework's routing
    costs more than a command takes."""

    async def app(scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix("/v1/")
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        call = _Call(scope["method"], tuple(path.split("/")), query, dict(scope["headers"]), body, receive)
        try:
            answer, status = await _answer(desk, call), 200
        except Exception as error:
            answer, status = pack_error(error), _status(error)
        if isinstance(answer, _Stream):
            await _send_stream(answer, receive, send)
            return
        try:
            with desk.holding(len(answer)):
                await _send_in_time(send, status, answer, desk.limits.seconds(len(answer)))
        except QuotaExceeded as error:
            await _send(send, _status(error), pack_error(error))

    return app


async def _answer(desk: Desk, call: _Call) -> _Answer:
    """Do what a request asks for."""
    kind = call.parts[0]
    if kind == "channels" and len(call.parts) == 3 and call.method == "POST":
        return await _ask_channel(desk, call, call.parts[1], call.parts[2])
    if kind == "processes" and len(call.parts) == 3 and call.method == "POST":
        return await _tell_process(desk, call, call.parts[1], call.parts[2])
    if kind == "sandboxes":
        return await _change_sandbox(desk, call)
    match call.method, *call.parts:
        case "GET", "boot":
            return desk.boot.encode()
        case "POST", "stream":
            queue = desk.subscribe(call.client, unpack(list[str], call.body))
            return _Stream(_lines(queue), lambda: desk.unsubscribe(queue))
        case "POST", "list":
            return pack_json([asdict(seen) for seen in await desk.list(unpack(dict[str, str], call.body))])
        case "DELETE", "calls", name:
            await desk.withdraw(name)
        case "DELETE", "snapshots", name:
            await desk.discard(name)
        case _:
            raise _unknown(call)
    return b""


async def _change_sandbox(desk: Desk, call: _Call) -> _Answer:
    def told(box: Box) -> bytes:
        spec = box.spec.model_dump(mode="json")
        return pack_json({"channel": box.key, "isolation": desk.isolation(box), "spec": spec})

    match call.method, *call.parts[1:]:
        case "PUT", id:
            body = unpack(dict[str, Any], call.body)
            spec = unpack(SandboxSpec, pack_json(body.get("spec")))
            labels = unpack(dict[str, str], pack_json(body.get("labels")))
            return told(await _run(desk, call, desk.create(id, spec, labels, call.client)))
        case "DELETE", id:
            await desk.remove(id)
        case "GET", id:
            return pack_json(asdict(await desk.inspect(id)))
        case "GET", id, "logs":
            return await desk.backend.logs(desk.box(id).id, call.number("tail"))
        case "POST", id, "attach":
            return told(await _run(desk, call, desk.attach(id, call.client)))
        case "POST", id, "restart":
            return told(await _run(desk, call, desk.restart(id, call.client)))
        case "POST", id, "snapshot":
            return pack_json(asdict(await _run(desk, call, desk.snapshot(id, call.client))))
        case "POST", id, "restore":
            await _run(desk, call, desk.restore(id, unpack(str, call.body)))
        case "POST", id, "extend":
            await desk.extend(id, unpack(float | None, call.body))
        case "POST", id, "pause":
            await _run(desk, call, desk.backend.pause(desk.box(id).id))
        case "POST", id, "resume":
            await _run(desk, call, desk.backend.resume(desk.box(id).id))
        case _:
            raise _unknown(call)
    return b""


async def _ask_channel(desk: Desk, call: _Call, key: str, verb: str) -> _Answer:
    if verb in ("exec", "spawn"):
        asked = unpack_request(call.body)
        check_amount(desk.policy, "output", asked.output_limit)
        channel = desk.channel(key)[1]
        if verb == "exec":
            return pack_result(await _run(desk, call, channel.exec(asked), stay=asked.idempotency_key is not None))
        process = await _run(desk, call, channel.spawn(asked))
        handle = new_id()
        desk.processes[handle] = process

        def ended() -> None:
            del desk.processes[handle]
            desk.background(_kill(process))

        return _Stream(_process_frames(handle, process), ended)
    head, data = wire.unpack(call.body, "bb")
    about, channel = unpack(About, head), desk.channel(key)[1]
    if verb == "read":
        check_amount(desk.policy, "file", about.number)
        return _Stream(_file_frames(channel, about.path, int(about.number)), lambda: None)
    asked_for: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "write": lambda: channel.write(about.path, data, int(about.number)),
        "list": lambda: _listed(channel, about.path),
        "stat": lambda: _looked(channel, about.path),
        "remove": lambda: channel.remove(about.path),
        "mkdir": lambda: channel.mkdir(about.path),
        "stats": lambda: _counted(channel),
        "ping": lambda: channel.ping(about.number),
    }
    if verb not in asked_for:
        raise _unknown(call)
    return pack_json(await _run(desk, call, asked_for[verb]()))


async def _tell_process(desk: Desk, call: _Call, handle: str, verb: str) -> _Answer:
    process = desk.processes.get(handle)
    if verb not in ("input", "end", "kill"):
        raise _unknown(call)
    if process is None:
        if verb == "input":
            raise BrokenPipeError("the command has ended")
    elif verb == "input":
        await _run(desk, call, process.write(call.body))
    elif verb == "end":
        await process.close_stdin()
    else:
        await process.kill(call.number("number"))
    return b""


async def _run(desk: Desk, call: _Call, work: Coroutine[Any, Any, Any], *, stay: bool = False) -> Any:
    name = call.headers.get(CALL.encode(), b"").decode("latin-1") or new_id()
    return await desk.run(name, work, None if stay else _left(call.receive))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lines(queue: asyncio.Queue[bytes | None]) -> AsyncGenerator[bytes, None]:
    while (line := await queue.get()) is not None:
        yield line


async def _listed(channel: Channel, path: str) -> Any:
    return [asdict(info) for info in await channel.list(path)]


async def _looked(channel: Channel, path: str) -> Any:
    info = await channel.stat(path)
    return None if info is None else asdict(info)


async def _counted(channel: Channel) -> Any:
    return asdict(await channel.stats())


async def _process_frames(handle: str, process: Process) -> AsyncGenerator[bytes, None]:
    """A running command as frames: its handle, its output, and how it ended."""
    yield wire.encode(Kind.STARTED, 0, handle.encode())
    try:
        async for stream, data in process:
            kind = Kind.OUTPUT if stream == "stdout" else Kind.ERRORS
            for piece in _pieces(data):
                yield wire.encode(kind, 0, piece)
        yield wire.encode(Kind.DONE, 0, pack_result(await process.wait()))
    except Exception as error:
        yield wire.encode(Kind.FAIL, 0, pack_error(error)[: wire.MAX_PAYLOAD])


async def _file_frames(channel: Channel, path: str, limit: int) -> AsyncGenerator[bytes, None]:
    """A file's content as frames, and whether it is whole."""
    try:
        async with contextlib.aclosing(channel.stream(path, limit)) as content:
            async for data in content:
                for piece in _pieces(data):
                    yield wire.encode(Kind.OUTPUT, 0, piece)
        yield wire.encode(Kind.DONE, 0)
    except Exception as error:
        yield wire.encode(Kind.FAIL, 0, pack_error(error)[: wire.MAX_PAYLOAD])


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[start : start + wire.CHUNK] for start in range(0, len(data), wire.CHUNK))


async def _kill(process: Process) -> None:
    with contextlib.suppress(SandboxError, OSError):
        await process.kill(9)


def _unknown(call: _Call) -> ProtocolError:
    return ProtocolError(f"there is no call {call.method} {'/'.join(call.parts)!r}")


def _status(error: Exception) -> int:
    if isinstance(error, ProtocolError):
        return 400
    if isinstance(error, SandboxError | BrokenPipeError | asyncio.TimeoutError):
        return 409
    _log.error("a call failed: %s: %s", type(error).__name__, error, exc_info=error)
    return 500


async def _send_in_time(send: Send, status: int, payload: bytes, seconds: float) -> None:
    if len(payload) <= wire.CHUNK:  # It fits into what the transport holds for a client.
        await _send(send, status, payload)
        return
    try:
        await asyncio.wait_for(_send(send, status, payload), seconds)
    except asyncio.TimeoutError:
        _log.warning("a client did not take an answer of %d bytes in %.0f s", len(payload), seconds)


async def _send(send: Send, status: int, payload: bytes) -> None:
    """Piece by piece: each waits until the client has taken those before it."""
    headers = [(b"content-length", str(len(payload)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    left = len(payload)
    for piece in _pieces(payload):
        left -= len(piece)
        await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
    if not payload:
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_stream(stream: _Stream, receive: Receive, send: Send) -> None:
    work = {asyncio.ensure_future(_pump(stream.chunks, send)), asyncio.ensure_future(_left(receive))}
    try:
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in work:
            task.cancel()
        stream.ended()
        await asyncio.wait(work)


async def _pump(chunks: AsyncGenerator[bytes, None], send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"no-store")]})
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Service:
    """A server in this event loop: ``async with Service(backend, token=…) as service: … service.url``."""

    def __init__(
        self,
        backend: Backend,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        policy: Policy | None = None,
        limits: Limits | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        """Raises ``ConfigError`` for an address beyond this machine without certificate and key, or one in use."""
        secure = certificate is not None and key is not None
        if not secure and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give a TLS certificate and its key, or listen on 127.0.0.1"
            )
        limits = limits or Limits()
        self.desk = Desk(backend, policy or Policy(), limits)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
            # Accepted connections inherit it. asyncio sets it only where the socket names its protocol, which these
            # do not; without it each small answer waits for the client's delayed acknowledgement.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if secure else 'http'}://{shown}:{self._socket.getsockname()[1]}"
        self._server = _Server(
            uvicorn.Config(
                Gate(application(self.desk), token, limits),  # pyright: ignore[reportArgumentType]
                http=impatient(limits.header_seconds),
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=2 * limits.requests,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_STOP_SECONDS,
                ssl_certfile=certificate,
                ssl_keyfile=None if key is None else str(key),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Service:
        try:
            await self.desk.start()
        except BaseException:
            self._socket.close()
            raise
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        await self.desk.stop()
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the process that serves, not for this library."""
        yield


def serve(
    backend: str = "docker",
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    token_file: str | Path | None = None,
    policy: Policy | None = None,
    limits: Limits | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM; then remove all sandboxes of this server and return.

    The token comes from ``token_file``, the environment, or this user's runtime directory, where one is made (see
    ``find_token``). ``announce`` gets the URL once it answers. Raises ``ConfigError``, ``EngineUnavailable``.
    """
    token = find_token(token_file, make=True)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with Service(
            backend_named(backend),
            token=token,
            host=host,
            port=port,
            policy=policy,
            limits=limits,
            certificate=certificate,
            key=key,
        ) as service:
            announce(service.url)
            await stop.wait()

    asyncio.run(main())
