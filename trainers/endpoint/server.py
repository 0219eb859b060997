"""An OpenAI-compatible server in front of an engine: ``/v1/models`` and ``/v1/chat/completions``.

Invariant: a client needs a token, or the key of a recorded session; web pages are never clients, and other machines
reach the server only over TLS. A request whose client has gone is cancelled, and is not
recorded, unless it is the first of a recorded session.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from agentkit.errors import ConfigError
from agentkit.http_server import HttpServer, Message, Receive, Send
from agentkit.sandboxes.server.auth import is_loopback
from agentkit.sandboxes.tasks import retrieve, stopped, tracked
from agentkit.trainers.endpoint.protocol import ApiError, Reply, chunks, read_request, response
from agentkit.trainers.endpoint.service import ChatService, Session, Work

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

PORT = 8000
_LIMIT = 16 << 20
"""Bytes of the longest request."""
_BODY_SECONDS = 30.0
_HEARTBEAT_SECONDS = 10.0
"""Seconds between comments in a stream whose answer is not complete."""
_MOST_CONNECTIONS = 1 << 14


class ChatServer:
    """A server for one model, for ``async with``; ``url`` is the base URL of the API.

    Args:
        service: answers the requests.
        host: the address to listen on; others than loopback need a certificate.
        port: the port; 0 chooses a free one.
        tokens: tokens of clients whose requests are not recorded; none: there are only recorded sessions.
        certificate: path of a TLS certificate.
        key: path of the key of the certificate.

    Raises:
        ConfigError: the address is in use, the certificate cannot be used, or other machines could read the requests.
    """

    def __init__(
        self,
        service: ChatService,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        tokens: Sequence[str] = (),
        certificate: str | Path | None = None,
        key: str | Path | None = None,
    ) -> None:
        check_exposure(host, certificate, key)
        self._service, self._tokens = service, [token.encode() for token in tokens]
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._created = int(time.time())
        self._closing = False
        self._http = HttpServer(
            self._handle, host, port, certificate=certificate, key=key, limit_concurrency=_MOST_CONNECTIONS
        )
        self.url = f"{self._http.url}/v1"

    async def __aenter__(self) -> ChatServer:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await stopped(self._tasks)
        await self._http.__aexit__()

    @contextlib.contextmanager
    def recording(self, session: Session) -> Iterator[str]:
        """Accept requests of a session while the context lasts; the value is its key. Answers end with it."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            for answer in session.answering:
                answer.cancel()

    async def _handle(self, scope: Message, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):  # the client has gone
            try:
                await self._route(scope, receive, send)
            except ApiError as error:
                await _send_json(send, error.status, error.body)
            except OSError:
                raise
            except asyncio.CancelledError:
                if not self._closing:
                    raise
                await _send_json(send, 503, ApiError(503, "the server ends").body)
            except Exception:
                _log.exception("a request to %s failed", scope["path"])
                await _send_json(send, 500, ApiError(500, "the server failed; see its log").body)

    async def _route(self, scope: Message, receive: Receive, send: Send) -> None:
        route = f"{scope['method']} {scope['path'].rstrip('/')}"
        if route == "GET /health":
            return await _send_json(send, 200, {"status": "ok"})
        session = self._session(scope)
        name = self._service.model
        model = {"id": name, "object": "model", "created": self._created, "owned_by": "agentkit"}
        if route == "GET /v1/models":
            return await _send_json(send, 200, {"object": "list", "data": [model]})
        if scope["method"] == "GET" and scope["path"].startswith("/v1/models/"):
            if unquote(scope["path"].removeprefix("/v1/models/")) == name:
                return await _send_json(send, 200, model)
            raise ApiError(404, f"the model here is {name!r}", param="model", code="model_not_found")
        if route == "POST /v1/chat/completions":
            return await self._complete(session, receive, send)
        raise ApiError(404, f"there is no {route[:200]}; this server has GET /v1/models and POST /v1/chat/completions")

    def _session(self, scope: Message) -> Session | None:
        """Return the recorded session of a request, None for another client. Raises ``ApiError``."""
        headers = dict(scope["headers"])
        if b"origin" in headers:
            raise ApiError(403, "web pages may not use this server")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            session = self._sessions.get(token.decode("latin-1"))
            if session is not None:
                return session
            known = [hmac.compare_digest(token, one) for one in self._tokens]
            if any(known):
                return None
        raise ApiError(401, "wrong or no token: set the API key (OPENAI_API_KEY)", code="invalid_api_key")

    async def _complete(self, session: Session | None, receive: Receive, send: Send) -> None:
        request = read_request(await _body(receive))
        work = self._service.accept(request, session)
        if request.stream:
            await _send_stream(send, self._events(work, receive))
            return
        reply = await self._answer(work, receive)
        await _send_json(send, 200, response(reply))

    async def _answer(self, work: Work, receive: Receive) -> Reply:
        """Return the answer; cancel it if the client goes before, unless it is the first of a recorded session.

        Otherwise a policy could void its episode with an answer that is too long for the agent.
        """
        if work.session is None:
            return await _unless_gone(self._service.answer(work), receive)
        answering = tracked(self._service.answer(work), work.session.answering)
        answering.add_done_callback(retrieve)
        try:
            return await _unless_gone(asyncio.shield(answering), receive)
        except asyncio.CancelledError:
            if answering.cancelled():
                raise ApiError(400, "the session has ended") from None
            raise
        finally:
            if work.session.recorder.exchanges:
                answering.cancel()

    async def _events(self, work: Work, receive: Receive) -> AsyncIterator[str]:
        """Yield the lines of a streamed answer: comments while the engine computes, then its parts."""
        answering = asyncio.ensure_future(self._answer(work, receive))
        try:
            while not (await asyncio.wait({answering}, timeout=_HEARTBEAT_SECONDS))[0]:
                yield ": the model computes\n\n"
            for chunk in chunks(answering.result(), usage=work.request.include_usage):
                yield f"data: {json.dumps(chunk)}\n\n"
        except ApiError as error:
            yield f"data: {json.dumps(error.body)}\n\n"
        except ConnectionError:
            return
        except asyncio.CancelledError:
            if not self._closing:
                raise
            yield f"data: {json.dumps(ApiError(503, 'the server ends').body)}\n\n"
        except Exception:
            _log.exception("a streamed answer failed")
            yield f"data: {json.dumps(ApiError(500, 'the server failed; see its log').body)}\n\n"
        finally:
            answering.cancel()
            await asyncio.wait({answering})
        yield "data: [DONE]\n\n"


def check_exposure(host: str, certificate: str | Path | None, key: str | Path | None) -> None:
    """Raise ``ConfigError`` if other machines could reach ``host`` without TLS, or one of both files is missing."""
    if (certificate is None) != (key is None):
        raise ConfigError("a TLS certificate and its key belong together: give both")
    if not is_loopback(host) and certificate is None:
        raise ConfigError(
            f"{host} can be reached from other machines: give a TLS certificate and its key, or listen on 127.0.0.1"
        )


def check_address(host: str, port: int, certificate: str | Path | None, key: str | Path | None) -> None:
    """Raise what ``ChatServer`` would raise, before an engine is started for it."""
    check_exposure(host, certificate, key)

    async def nothing(scope: Message, receive: Receive, send: Send) -> None: ...

    HttpServer(nothing, host, port, certificate=certificate, key=key).close()


async def _unless_gone(work: Awaitable[_T], receive: Receive) -> _T:
    """Return the result of ``work``; cancel it and raise ``ConnectionError`` if the client goes before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ConnectionError("the client has gone")
    finally:
        await stopped({working, leaving})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Receive) -> Any:
    """Return the JSON value in the body of a request. Raises ``ApiError``."""
    try:
        content = await asyncio.wait_for(_bytes(receive), _BODY_SECONDS)
        return json.loads(content)
    except asyncio.TimeoutError:
        raise ApiError(408, "the body was not received in time") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def _bytes(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _LIMIT:
            raise ApiError(413, f"the body is longer than {_LIMIT} bytes")
        if not message.get("more_body"):
            return bytes(body)


async def _send_json(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_stream(send: Send, events: AsyncIterator[str]) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in events:
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
