"""A client's connection to one sandbox server: calls, and the stream by which the server tells what happens.

Invariant: a call is sent once. When its connection breaks after it was sent, it failed with effects that nobody knows
(``side_effects="maybe"``) and is not repeated here. Cancelling a call withdraws it on the server before the
cancellation goes on. A server that does not answer for ``patience`` seconds, or that was started anew, has lost the
sandboxes of this client, and each of their channels is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from agentkit.errors import AccessDenied, EngineUnavailable, ProtocolError, QuotaExceeded, SandboxError
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backends.remote_http import Answer, Broken, Client, Unreachable
from agentkit.sandboxes.remote_protocol import BEAT, CALL, CLIENT, pack_json, unpack_error

_CONNECT = 5.0
_WITHDRAW = 10.0
_ANSWER = 30.0
"""Seconds that a server may take for a call that names no time of its own, and longer than it names."""
_IDLE = 15.0
"""Seconds that an idle connection is kept: much shorter than servers keep it."""
_SILENCE = 4 * BEAT
_RETRY_MOST = 2.0
_PROBE = 0.1
_REFUSED = 0.5
"""Seconds for which a machine must refuse connections until its server counts as ended, and its sandboxes with it."""
_ERROR = 1 << 20
_LINE = 16 << 20


class Link:
    """One server. ``up``: it answers. ``load``: sandboxes it has, and may have; ``pending``: being made by us."""

    def __init__(self, url: str, token: str, client: str, tls: ssl.SSLContext | None, patience: float) -> None:
        self.url = url
        self.up = False
        self.boot = ""
        self.load = (0, 1)
        self.pending = 0
        self.body = 1 << 20
        self.channels: dict[str, Callable[[str], None]] = {}
        """By their keys: what tells a channel the reason why it is lost."""
        self.on_event: Callable[[dict[str, Any] | None], None] = lambda event: None
        """Gets each event of the server's engine, and None when some may have been missed."""
        self._patience = patience
        self._refused: Exception | None = None
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        headers = {"authorization": f"Bearer {token}", CLIENT: client}
        self._http = Client(url, headers, tls, connect=_CONNECT, idle=_IDLE)

    async def start(self) -> None:
        """Return when it is known whether the server answers. Raises ``AccessDenied``, ``EngineUnavailable``."""
        self._task = self._task or asyncio.ensure_future(self._follow())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), 2 * _CONNECT)
        if isinstance(self._refused, AccessDenied):
            raise self._refused
        if not self.up:
            raise self.unavailable(self._refused or "no answer in time")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        # Nothing is withdrawn now: the end of the connections says it for all.
        self.up = False
        self.lose_all("closed")
        self._http.close()

    async def call(
        self, method: str, path: str, content: bytes = b"", *, timeout: float = 0.0, limit: int = _LINE, **params: Any
    ) -> bytes:
        """The answer's body, at most ``limit`` bytes. ``timeout``: seconds that the call itself may take.

        Raises what the server says, ``EngineUnavailable`` (see the module), ``ProtocolError``.
        """
        async with self.exchange(method, path, content, timeout=timeout, **params) as answer:
            return await self._body(answer, limit)

    @contextlib.asynccontextmanager
    async def exchange(
        self, method: str, path: str, content: bytes = b"", *, timeout: float = 0.0, **params: Any
    ) -> AsyncIterator[Answer]:
        """A call whose answer is read as it comes. What breaks while it is read raises as in ``call``."""
        if len(content) > self.body:
            error = QuotaExceeded(f"{len(content)} bytes are more than the {self.body} that {self.url} takes at once")
            error.retryable = False
            raise error
        if self._http.closed:
            raise self.unavailable("this back end was closed")
        call = secrets.token_hex(16)
        sent = self._http.request(method, path, content, silence=timeout + _ANSWER, headers={CALL: call}, query=params)
        try:
            async with sent as answer:
                if answer.status != 200:
                    raise self._answered(answer.status, await self._body(answer, _ERROR))
                yield answer
        except asyncio.CancelledError:
            if self.up:
                await finished(self._withdraw(call))
            raise
        except Unreachable as problem:
            raise self.unavailable(problem) from None
        except Broken as problem:
            broken = self.unavailable(problem)
            broken.side_effects = "maybe"
            await self._probe()
            raise broken from None

    def unavailable(self, why: object) -> EngineUnavailable:
        return EngineUnavailable(f"the sandbox server {self.url} does not answer ({why}): is it running there?")

    def lose_all(self, reason: str) -> None:
        for lose in list(self.channels.values()):
            lose(reason)
        self.channels.clear()

    def _answered(self, status: int, body: bytes) -> Exception:
        if status == 503:
            return QuotaExceeded(f"the sandbox server {self.url} has all the connections that it may have")
        error = unpack_error(body)
        if isinstance(error, AccessDenied) and status == 401:
            return AccessDenied(f"{self.url}: {error}; both sides need the same token")
        return error

    async def _body(self, answer: Answer, limit: int) -> bytes:
        body = bytearray()
        async for chunk in answer:
            body += chunk
            if len(body) > limit:
                raise ProtocolError(f"an answer of {self.url} is longer than {limit} bytes")
        return bytes(body)

    async def _withdraw(self, call: str) -> None:
        # If nobody hears it, the end of the call's own connection says the same.
        with contextlib.suppress(Unreachable, Broken):
            async with self._http.request("DELETE", f"/v1/calls/{call}", silence=_WITHDRAW):
                pass

    async def _probe(self) -> None:
        """After a connection broke: whether the server did, within ``patience``; at once if it refuses another."""
        start = _now()
        refused = False
        while self.channels:
            left = start + (_REFUSED if refused else self._patience) - _now()
            if left <= 0:
                break
            try:
                async with self._http.request("GET", "/v1/boot", silence=max(left, _PROBE)) as answer:
                    if answer.status != 200 or await self._body(answer, _ERROR) == self.boot.encode():
                        return
                break
            except (Unreachable, Broken) as problem:
                refused = isinstance(problem, Unreachable) and problem.refused
            await asyncio.sleep(_PROBE)
        self.lose_all("engine_down")

    # The stream.

    async def _follow(self) -> None:
        pause, last = _PROBE, _now()
        while True:
            refused = False
            try:
                await self._read_stream()
            except (Unreachable, Broken, SandboxError, ValueError, TypeError, KeyError) as error:
                self._refused = error if isinstance(error, SandboxError) else self.unavailable(error)
                refused = isinstance(error, Unreachable) and error.refused
            if self.up:
                pause, last = _PROBE, _now()
                self.up = False
                self.on_event(None)
            if _now() - last >= (_REFUSED if refused else self._patience):
                self.lose_all("engine_down")
            self._settled.set()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST, max(self._patience / 4, _PROBE))

    async def _read_stream(self) -> None:
        keys = pack_json(list(self.channels))
        async with self._http.request("POST", "/v1/stream", keys, silence=_SILENCE) as answer:
            if answer.status != 200:
                raise self._answered(answer.status, await self._body(answer, _ERROR))
            rest = b""
            async for chunk in answer:
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE:
                    raise ProtocolError(f"a line of {self.url} is longer than {_LINE} bytes")
                for line in lines:
                    self._hear(json.loads(line))

    def _hear(self, told: dict[str, Any]) -> None:
        if "load" in told:
            used, most = told["load"]
            self.load = (int(used), max(int(most), 1))
        if "hello" in told:
            if self.boot not in ("", told["hello"]):
                self.lose_all("engine_down")
            self.boot, self.body, self.up, self._refused = str(told["hello"]), int(told["body"]), True, None
            self._settled.set()
        for key, reason in told.get("lost", {}).items():
            if lose := self.channels.pop(key, None):
                lose(str(reason))
        if "event" in told:
            self.on_event(told["event"])
        if "engine" in told:
            self.on_event(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
