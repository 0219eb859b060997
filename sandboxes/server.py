"""A server of sandboxes: any back end of this machine, over HTTP, for those who have its token.

Invariant: what a client sends has passed the ``Gate`` (who, how much, how fast) and the ``Policy`` (what) before a
back end hears of it. A call ends when its caller withdraws it or leaves, and what it had started is killed then; only
a command with an idempotency key runs on. The server listens on loopback alone unless it has a certificate.

``agentkit sandbox serve`` is ``serve``; ``agentkit.sandboxes.backends.remote`` is the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

from agentkit.errors import ConfigError, ProtocolError, SandboxError
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
from agentkit.sandboxes.server_gate import Gate, Receive, Send, impatient
from agentkit.sandboxes.server_policy import Limits, Policy, check_amount
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.wire import Kind

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep it, so that none uses one that just closed."""
_STOP_SECONDS = 3


def application(desk: Desk) -> FastAPI:
    """The calls of ``Backend`` and ``Channel`` as paths."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(Exception, _failed)
    # FastAPI's handler for ``Exception`` raises again; the errors that are answers are named.
    for kind in (SandboxError, BrokenPipeError, asyncio.TimeoutError):
        app.add_exception_handler(kind, _failed)
    _add_sandboxes(app, desk)
    _add_channels(app, desk)
    _add_processes(app, desk)

    @app.get("/v1/boot")
    async def boot() -> Response:
        return Response(desk.boot)

    @app.post("/v1/stream")
    async def stream(request: Request) -> Response:
        queue = desk.subscribe(_client(request), unpack(list[str], await request.body()))

        async def lines() -> AsyncIterator[bytes]:
            while (line := await queue.get()) is not None:
                yield line

        return _Streamed(lines(), lambda: desk.unsubscribe(queue))

    @app.delete("/v1/calls/{call}")
    async def withdraw(call: str) -> Response:
        await desk.withdraw(call)
        return Response()

    return app


def _add_sandboxes(app: FastAPI, desk: Desk) -> None:
    def told(box: Box) -> Response:
        spec = box.spec.model_dump(mode="json")
        return _json({"channel": box.key, "isolation": desk.isolation(box), "spec": spec})

    @app.put("/v1/sandboxes/{id}")
    async def create(id: str, request: Request) -> Response:
        body = unpack(dict[str, Any], await request.body())
        spec, labels = (
            unpack(SandboxSpec, pack_json(body.get("spec"))),
            unpack(dict[str, str], pack_json(body.get("labels"))),
        )
        return told(await _run(desk, request, desk.create(id, spec, labels, _client(request))))

    @app.delete("/v1/sandboxes/{id}")
    async def remove(id: str) -> Response:
        await desk.remove(id)
        return Response()

    @app.get("/v1/sandboxes/{id}")
    async def inspect(id: str) -> Response:
        return _json(asdict(await desk.inspect(id)))

    @app.get("/v1/sandboxes/{id}/logs")
    async def logs(id: str, tail: int) -> Response:
        return Response(await desk.backend.logs(desk.box(id).id, tail))

    @app.post("/v1/list")
    async def list_(request: Request) -> Response:
        seen = await desk.list(unpack(dict[str, str], await request.body()))
        return _json([asdict(item) for item in seen])

    @app.post("/v1/sandboxes/{id}/{verb}")
    async def change(id: str, verb: str, request: Request) -> Response:
        body = await request.body()
        if verb in ("attach", "restart"):
            call = desk.attach if verb == "attach" else desk.restart
            return told(await _run(desk, request, call(id, _client(request))))
        if verb == "snapshot":
            return _json(asdict(await _run(desk, request, desk.snapshot(id))))
        if verb == "restore":
            await _run(desk, request, desk.restore(id, unpack(str, body)))
        elif verb == "extend":
            await desk.extend(id, unpack(float | None, body))  # pyright: ignore[reportArgumentType]
        elif verb in ("pause", "resume"):
            box = desk.box(id)
            await _run(desk, request, (desk.backend.pause if verb == "pause" else desk.backend.resume)(box.id))
        else:
            raise ProtocolError(f"there is no call {verb!r}")
        return Response()

    @app.delete("/v1/snapshots/{name}")
    async def discard(name: str) -> Response:
        await desk.discard(name)
        return Response()


def _add_channels(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/channels/{key}/exec")
    async def exec(key: str, request: Request) -> Response:
        asked = unpack_request(await request.body())
        check_amount(desk.policy, "output", asked.output_limit)
        work = desk.channel(key)[1].exec(asked)
        return Response(pack_result(await _run(desk, request, work, stay=asked.idempotency_key is not None)))

    @app.post("/v1/channels/{key}/spawn")
    async def spawn(key: str, request: Request) -> Response:
        asked = unpack_request(await request.body())
        check_amount(desk.policy, "output", asked.output_limit)
        channel = desk.channel(key)[1]
        process = await _run(desk, request, channel.spawn(asked))
        handle = new_id()
        desk.processes[handle] = process

        def ended() -> None:
            del desk.processes[handle]
            desk.background(_kill(process))

        return _Streamed(_frames(handle, process), ended)

    @app.post("/v1/channels/{key}/{verb}")
    async def ask(key: str, verb: str, request: Request) -> Response:
        head, data = wire.unpack(await request.body(), "bb")
        about, channel = unpack(About, head), desk.channel(key)[1]
        if verb == "read":
            return Response(await _run(desk, request, channel.read(about.path, int(about.number))))
        asked: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "write": lambda: channel.write(about.path, data, int(about.number)),
            "list": lambda: _listed(channel, about.path),
            "stat": lambda: _looked(channel, about.path),
            "remove": lambda: channel.remove(about.path),
            "mkdir": lambda: channel.mkdir(about.path),
            "stats": lambda: _counted(channel),
            "ping": lambda: channel.ping(about.number),
        }
        if verb not in asked:
            raise ProtocolError(f"there is no call {verb!r}")
        return _json(await _run(desk, request, asked[verb]()))


def _add_processes(app: FastAPI, desk: Desk) -> None:
    @app.post("/v1/processes/{handle}/{verb}")
    async def tell(handle: str, verb: str, request: Request, number: int = 9) -> Response:
        process = desk.processes.get(handle)
        if process is None:
            if verb == "input":
                raise BrokenPipeError("the command has ended")
        elif verb == "input":
            await _run(desk, request, process.write(await request.body()))
        elif verb == "end":
            await process.close_stdin()
        elif verb == "kill":
            await process.kill(number)
        else:
            raise ProtocolError(f"there is no call {verb!r}")
        return Response()


async def _run(desk: Desk, request: Request, work: Coroutine[Any, Any, Any], *, stay: bool = False) -> Any:
    return await desk.run(request.headers.get(CALL, new_id()), work, None if stay else _left(request.receive))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _listed(channel: Channel, path: str) -> Any:
    return [asdict(info) for info in await channel.list(path)]


async def _looked(channel: Channel, path: str) -> Any:
    info = await channel.stat(path)
    return None if info is None else asdict(info)


async def _counted(channel: Channel) -> Any:
    return asdict(await channel.stats())


async def _frames(handle: str, process: Process) -> AsyncIterator[bytes]:
    """A running command as frames: its handle, its output, and how it ended."""
    yield wire.encode(Kind.STARTED, 0, handle.encode())
    try:
        async for stream, data in process:
            for start in range(0, len(data), wire.CHUNK):
                kind = Kind.OUTPUT if stream == "stdout" else Kind.ERRORS
                yield wire.encode(kind, 0, data[start : start + wire.CHUNK])
        yield wire.encode(Kind.DONE, 0, pack_result(await process.wait()))
    except Exception as error:
        yield wire.encode(Kind.FAIL, 0, pack_error(error)[: wire.MAX_PAYLOAD])


async def _kill(process: Process) -> None:
    with contextlib.suppress(SandboxError, OSError):
        await process.kill(9)


async def _failed(request: Any, error: Exception) -> Response:
    foreseen = isinstance(error, SandboxError | BrokenPipeError | asyncio.TimeoutError)
    status = 400 if isinstance(error, ProtocolError) else 409 if foreseen else 500
    return Response(pack_error(error), status, media_type="application/json")


def _client(request: Request) -> str:
    return request.headers.get(CLIENT, "")


def _json(value: Any) -> Response:
    return Response(pack_json(value), media_type="application/json")


class _Streamed(Response):
    """Bytes as they come, at the reader's pace; ``ended`` is called once, however it ends."""

    def __init__(self, chunks: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__()
        self._chunks = chunks
        self._ended = ended

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:  # pyright: ignore
        work = {asyncio.ensure_future(self._pump(send)), asyncio.ensure_future(_left(receive))}
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            self._ended()
            await asyncio.wait(work)

    async def _pump(self, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in self._chunks:
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
