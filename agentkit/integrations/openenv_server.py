"""Serve an environment over OpenEnv's protocol (0.10), to its clients and to trainers that speak it.

Invariant: each WebSocket has its own environment, which is closed with it, and a failure ends only its session. Other
machines reach the server only with a token and over TLS; web pages are never clients.

``agentkit env serve`` runs ``serve``; ``openenv_client`` is our client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentkit import registry
from agentkit.envs.base import AsyncTextEnv
from agentkit.envs.isolation.env import RESET_TIMEOUT, STEP_TIMEOUT
from agentkit.envs.isolation.validation import Description
from agentkit.envs.vector.slots import Slot, Slots, Timeouts
from agentkit.errors import AgentkitError, ConfigError, EnvCrashed
from agentkit.http_server import HttpServer, Message, Receive, Send
from agentkit.integrations.openenv_session import (
    Failure,
    Refusal,
    ResetRequest,
    Session,
    TextAction,
    parsed,
    schemas,
    validated,
)
from agentkit.integrations.openenv_tokens import TOKEN
from agentkit.sandboxes.arguments import check_integer, check_positive
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.server.auth import is_loopback
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished, stopped

_log = logging.getLogger(__name__)

PORT, MAX_SESSIONS, IDLE_TIMEOUT = 8000, 64, 3600.0
_LIMIT = 4 << 20
"""Bytes of the longest request or message."""
_BODY_SECONDS, _PING_SECONDS = 30.0, 20.0
_STATUS = {"INVALID_JSON": 422, "VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503}
_ROUTES = {"/health": "get", "/metadata": "get", "/schema": "get", "/state": "get", "/reset": "post", "/step": "post"}


class OpenEnvServer:
    """A server for one environment, for ``async with``; ``url`` is its address.

    Args:
        id: a registered name.
        kwargs: arguments of the environment.
        sandbox: where environments run, as in ``agentkit.make``. None: in this process, or in worker processes if the
            environment declares ``process``.
        sandbox_spec: fields of the sandbox's specification that differ from the defaults.
        host: the address to listen on; others than loopback need a token and a certificate.
        port: the port; 0 chooses a free one.
        max_sessions: sessions at one time; further ones are refused with ``CAPACITY_REACHED``.
        max_steps: steps after which an episode is truncated; None: ``max_turns`` times ``actions_per_turn``.
        idle_timeout: seconds without a message after which a session ends.
        step_timeout: seconds that a step may take.
        reset_timeout: seconds that making or resetting an environment may take.
        tokens: tokens of clients; none: every client is accepted.
        certificate: path of a TLS certificate.
        key: path of the key of the certificate.

    Raises:
        ConfigError: an argument is wrong, the address is in use, or other machines could use the server freely.
        RegistryError: the environment is unknown or does not load.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        sandbox: str | SandboxSpec | Backend | None = None,
        sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = PORT,
        max_sessions: int = MAX_SESSIONS,
        max_steps: int | None = None,
        idle_timeout: float = IDLE_TIMEOUT,
        step_timeout: float = STEP_TIMEOUT,
        reset_timeout: float = RESET_TIMEOUT,
        tokens: Sequence[str] = (),
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        check_integer("max_sessions", max_sessions, 1)
        check_positive(
            max_steps=max_steps, idle_timeout=idle_timeout, step_timeout=step_timeout, reset_timeout=reset_timeout
        )
        secure = certificate is not None and key is not None
        if not is_loopback(host) and not (secure and tokens):
            raise ConfigError(
                f"{host} can be reached from other machines: give a TLS certificate, its key and a token (--token-file "
                f"or {TOKEN}), or listen on 127.0.0.1"
            )
        self._id = id
        self._slots = _slots(id, kwargs or {}, sandbox, sandbox_spec, Timeouts(reset_timeout, step_timeout))
        self._max_sessions, self._max_steps, self._idle_timeout = max_sessions, max_steps, idle_timeout
        self._tokens = [token.encode() for token in tokens]
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._http_server = HttpServer(
            self._answer,
            host,
            port,
            certificate=certificate,
            key=key,
            ws="websockets-sansio",
            ws_max_size=_LIMIT,
            ws_ping_interval=_PING_SECONDS,
            ws_ping_timeout=None,  # a client that generates text may answer late; ``idle_timeout`` ends silent sessions
            ws_per_message_deflate=False,
        )
        self.url = self._http_server.url

    async def __aenter__(self) -> OpenEnvServer:
        first = self._slots.make()
        try:
            self._description = description = await self._started(first)
        except BaseException:
            self._http_server.close()
            await finished(self._slots.close())
            raise
        finally:
            await finished(first.close())
        self._max_steps = self._max_steps or description.max_turns * description.actions_per_turn
        await self._http_server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http_server.__aexit__()
        await stopped(self._tasks)
        await self._slots.close()

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):  # the client has gone
            if scope["type"] == "http":
                status, content = await self._http(scope, receive)
                body = json.dumps(content).encode()
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})
            elif scope["path"] != "/ws" or self._forbidden(scope):
                await send({"type": "websocket.close"})
            else:
                await self._websocket(receive, send)

    def _forbidden(self, scope: Message) -> int:
        """Return the status for a request that is not allowed; 0 if it is."""
        headers = dict(scope["headers"])
        if b"origin" in headers:
            return 403
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(token, one) for one in self._tokens]
        return 401 if self._tokens and not (scheme == b"Bearer" and any(known)) else 0

    async def _websocket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})

        async def reply(kind: str, data: Mapping[str, Any]) -> None:
            await send({"type": "websocket.send", "text": json.dumps({"type": kind, "data": data})})

        async def talk(session: Session) -> None:
            while (text := await self._next(receive)) is not None:
                try:
                    message = parsed(text)
                    if message.get("type") == "close":
                        return
                    await reply(*await session.answer(message))
                except Refusal as refusal:
                    await reply("error", refusal.data)
                    if isinstance(refusal, Failure):
                        return

        try:
            async with self._session() as session:
                await talk(session)
        except Failure as failure:
            await reply("error", failure.data)
        await send({"type": "websocket.close"})

    async def _next(self, receive: Receive) -> str | None:
        """Return the next frame, empty if it holds bytes; None at the end of the connection. Raises ``Failure``."""
        try:
            message = await asyncio.wait_for(receive(), self._idle_timeout)
        except asyncio.TimeoutError:
            raise Failure("SESSION_ERROR", f"the session was idle for {self._idle_timeout:g} s") from None
        return message.get("text") or "" if message["type"] == "websocket.receive" else None

    async def _started(self, slot: Slot) -> Description:
        """Make an environment. Raises ``AgentkitError``."""
        try:
            return await slot.start()
        except AgentkitError:
            raise
        except Exception as error:  # of its constructor
            raise EnvCrashed(f"{self._id} cannot be made: {type(error).__name__}: {error}") from error

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        """Provide a session with a new environment. Raises ``Failure`` if there is none."""
        if len(self._sessions) >= self._max_sessions:
            counts = {"active_sessions": len(self._sessions), "max_sessions": self._max_sessions}
            raise Failure("CAPACITY_REACHED", f"all {self._max_sessions} sessions are in use", **counts)
        assert self._max_steps is not None
        slot = self._slots.make()
        session = Session(slot, self._description.instructions, self._max_steps)
        self._sessions.add(session)
        try:
            await self._started(slot)
            yield session
        except Refusal:
            raise
        except AgentkitError as error:
            raise Failure("FACTORY_ERROR", str(error)) from error
        except OSError:  # the client has gone
            raise
        except Exception as error:
            _log.exception("a session of %s failed", self._id)
            raise Failure("SESSION_ERROR", "the server failed; see its log") from error
        finally:
            # A client that waits for a session gets it now, and does not wait until the environment is closed.
            self._sessions.discard(session)
            await finished(session.close())

    async def _http(self, scope: Message, receive: Receive) -> tuple[int, Any]:
        """Return status and content of the answer to a request."""
        route = f"{scope['method']} {scope['path']}"
        if route != "GET /health" and (status := self._forbidden(scope)):
            return status, {"detail": "web pages may not use this server" if status == 403 else "wrong or no token"}
        description, package = self._description, version("agentkit-rl")
        match route:
            case "GET /health":
                return 200, {"status": "healthy"}
            case "GET /metadata":
                return 200, {"name": self._id, "description": description.instructions, "version": package}
            case "GET /schema":
                return 200, schemas(description, self._max_steps or 0)
            case "GET /state":
                return 200, {"episode_id": None, "step_count": 0, "active_sessions": len(self._sessions)}
            case "GET /openapi.json":
                paths = {path: {method: {"responses": {"200": {}}}} for path, method in _ROUTES.items()}
                return 200, {"openapi": "3.1.0", "info": {"title": self._id, "version": package}, "paths": paths}
            case "POST /reset" | "POST /step":
                return await self._alone(scope["path"], receive)
            case "POST /mcp":
                error = {"code": -32601, "message": "this server has no MCP tools; play over /ws"}
                return 200, {"jsonrpc": "2.0", "id": None, "error": error}
        return 404, {"detail": f"there is no {route}"}

    async def _alone(self, path: str, receive: Receive) -> tuple[int, Any]:
        """Answer ``POST /reset`` and ``POST /step``, each with an environment of its own.

        A step is the only one of its episode, as in tasks with one answer; the field ``seed`` chooses the task.
        """
        try:
            body = parsed(await asyncio.wait_for(_body(receive), _BODY_SECONDS) or "{}")
            action = validated(TextAction, body.get("action")) if path == "/step" else None
            request = validated(ResetRequest, {name: body[name] for name in ("seed", "episode_id") if name in body})
            async with self._session() as session:
                first = await session.reset(request)
                return 200, first if action is None else await session.step(action.text)
        except asyncio.TimeoutError:
            return 408, {"detail": "the body was not received in time"}
        except Refusal as refusal:
            return _STATUS.get(refusal.code, 500), {"detail": str(refusal), **refusal.data}


async def _body(receive: Receive) -> str:
    """Return the body of a request. Raises ``Refusal`` if it is too long or is not text."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _LIMIT:
            raise Refusal("VALIDATION_ERROR", f"the body is longer than {_LIMIT} bytes")
        if not message.get("more_body"):
            return body.decode("utf-8", "replace")


def _slots(
    id: str,
    kwargs: Mapping[str, Any],
    sandbox: str | SandboxSpec | Backend | None,
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None,
    timeouts: Timeouts,
) -> Slots:
    """Return the places of the environments: sandboxes, worker processes, or this process."""
    if sandbox is None and sandbox_spec is not None:
        raise ConfigError("sandbox_spec needs a sandbox; add one, such as sandbox='docker'")
    here = registry.arguments_here(id, kwargs, sandbox, sandbox_spec)
    if here is None:
        assert sandbox is not None
        return Slots(id, kwargs, sandbox, timeouts, sandbox_spec)
    spec = registry.entry(id).load()
    cls: Any = spec.entry_point
    registry.check_arguments(id, cls, {**spec.kwargs, **here})
    blocking = not issubclass(cls, AsyncTextEnv) and cls.concurrency == "process"
    return Slots(id, here, "process" if blocking else "async", timeouts)


def serve(
    id: str, kwargs: Mapping[str, Any] | None = None, *, announce: Callable[[str], None] = print, **options: Any
) -> None:
    """Serve an environment until SIGINT or SIGTERM, which end all sessions.

    Args:
        id: a registered name.
        kwargs: arguments of the environment.
        announce: called with the URL once the server accepts requests.
        options: further arguments of ``OpenEnvServer``.

    Raises:
        ConfigError, RegistryError, EnvError, SandboxError: the environment cannot be made or served.
    """

    async def main() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with OpenEnvServer(id, kwargs, **options) as server:
            announce(server.url)
            await ended.wait()

    asyncio.run(main())
