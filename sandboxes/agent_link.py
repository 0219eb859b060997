"""The host's end of one connection to an agent: requests out, frames in, none of them believed.

Invariant: memory is bounded by what was asked for (each exchange has a room that its answers may fill), whatever the
other side sends. A frame that is malformed, answers nothing, answers twice or brings more than was allowed ends the
connection; nothing in a frame ever becomes a class, a path or a message. When the connection ends, everything that
waits on it ends too.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentkit.errors import (
    AgentkitError,
    CommandNotFound,
    DiskFull,
    FileTooLarge,
    PathError,
    ProtocolError,
    ResourcesExhausted,
    SandboxError,
    SandboxLost,
)
from agentkit.sandboxes import wire
from agentkit.sandboxes.types import Stream
from agentkit.sandboxes.wire import Failure, Frame, Kind

WINDOW = 1 << 18
"""Bytes of input that an agent lets wait for one job or connection."""
_OVERDUE = 10.0
"""Seconds after its timeout in which a job must have been answered."""
_CANCEL = 4.0
_MAX_RELAYS = 128

_FAILURES: dict[int, tuple[type[SandboxError], str]] = {
    Failure.COMMAND: (CommandNotFound, "cannot run {what}"),
    Failure.PATH: (PathError, "cannot {what}"),
    Failure.TOO_LARGE: (FileTooLarge, "cannot {what}: it is larger than the limit of the call"),
    Failure.DISK_FULL: (DiskFull, "cannot {what}"),
    Failure.RESOURCES: (ResourcesExhausted, "no process, memory or open file is left in the sandbox to {what}"),
    Failure.BAD_REQUEST: (SandboxError, "the agent refused to {what}"),
    Failure.FORGOTTEN: (SandboxError, "{what} ran already under this idempotency key; its result is no longer kept"),
    Failure.KILLED: (
        SandboxError,
        "cannot {what}: the process that did it was killed, by a program in the sandbox or for memory",
    ),
    Failure.INTERNAL: (SandboxError, "the agent failed to {what}; does the sandbox's Python lack a module?"),
}


@dataclass(frozen=True)
class Done:
    """How a job ended. Numbers are the agent's word; output is what it had not sent before."""

    code: int
    signal: int
    flags: int
    duration: float
    stdout: bytes
    stderr: bytes


class Exchange:
    """One request, or one relayed connection: what goes out for it and what may come back."""

    def __init__(self, link: Link, id: int, what: str, room: int, take: Callable[[Stream, bytes], None]) -> None:
        self._link, self.id, self.what, self.take = link, id, what, take
        self._room = room
        self.done: asyncio.Future[Done] = link.loop.create_future()
        self.done.add_done_callback(_seen)
        self.started: asyncio.Future[int] = link.loop.create_future()
        self.started.add_done_callback(_seen)
        self._input: deque[memoryview] = deque()
        self._input_room = WINDOW
        self._input_ended = self.input_broken = self.output_ended = False
        self.on_output_end: Callable[[], None] = lambda: None
        self._input_moved = asyncio.Event()
        self._watchdog: asyncio.TimerHandle | None = None

    # What goes out

    def grant(self, count: int) -> None:
        """Allow ``count`` more bytes of output."""
        if not self.done.done():
            self._room += count
            self._link.send(Kind.CREDIT, self.id, wire.pack(count))

    def feed(self, data: bytes | memoryview) -> None:
        """Send input as the other side makes room for it. Does not wait."""
        if data and not self.input_broken:
            self._input.append(memoryview(data))
            self._pump()

    async def drained(self) -> None:
        """Wait until all input is on its way. Raises ``BrokenPipeError`` if nobody reads it, ``SandboxLost``."""
        while self._input and not self.done.done():
            self._input_moved.clear()
            await self._input_moved.wait()
        if self.done.done() and self.done.exception() is not None:
            self.done.result()
        if self.input_broken or self._input:
            raise BrokenPipeError(errno.EPIPE, f"{self.what}: the program reads no more input")

    def end_input(self) -> None:
        """Close the input once all of it is sent. Twice is fine."""
        if not self._input_ended:
            self._input_ended = True
            self._pump()

    @property
    def input_ended(self) -> bool:
        """Whether nothing more will go out: it was ended and all of it is sent, or nobody reads it."""
        return self.input_broken or (self._input_ended and not self._input)

    def used(self, count: int) -> None:
        """Input that went with the request takes its place in the window too."""
        self._input_room -= count

    def _pump(self) -> None:
        while self._input and self._input_room > 0:
            head = self._input[0]
            piece = head[: min(self._input_room, wire.CHUNK)]
            self._link.send(Kind.INPUT, self.id, bytes(piece))
            self._input_room -= len(piece)
            if len(piece) == len(head):
                self._input.popleft()
            else:
                self._input[0] = head[len(piece) :]
        if not self._input:
            self._input_moved.set()
            if self._input_ended and not self.input_broken and not self.done.done():
                self._link.send(Kind.INPUT_END, self.id)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        if not self.done.done():
            self._link.send(kind, self.id, payload)

    def watch(self, timeout: float) -> None:
        """End the connection if there is no answer ``timeout`` seconds (and some) from now."""
        self._watchdog = self._link.loop.call_later(timeout + _OVERDUE, self._overdue, timeout)

    def _overdue(self, timeout: float) -> None:
        message = f"the agent did not answer {timeout + _OVERDUE:.0f} s after it was asked to {self.what}"
        self._link.drop("agent_dead", SandboxLost(message, reason="agent_dead"))

    async def cancel(self) -> None:
        """Kill the job and wait, a few seconds, until it is gone."""
        if not self.done.done():
            self.send(Kind.CANCEL)
            await asyncio.wait([self.done], timeout=_CANCEL)

    # What comes in

    def output(self, stream: Stream, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            raise ProtocolError(f"the agent sent more output than it was allowed to for: {self.what}")
        self.take(stream, data)

    def end_output(self) -> None:
        """A relayed connection brings no more; what goes out of it still may."""
        self.output_ended = True
        self.on_output_end()

    def credit(self, count: int) -> None:
        if not 0 < count <= WINDOW - self._input_room:
            raise ProtocolError(f"the agent acknowledged {count} bytes of input that it was not sent")
        self._input_room += count
        self._pump()

    def break_input(self) -> None:
        self.input_broken = True
        self._input.clear()
        self._input_moved.set()

    def end(self, done: Done | AgentkitError) -> None:
        """The answer, or why there will be none."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.done.done():
            return
        if isinstance(done, Done):
            self.done.set_result(done)
            if not self.started.done():
                self.started.cancel()
        else:
            self.done.set_exception(done)
            if not self.started.done():
                self.started.set_exception(done)
        self._input_moved.set()


class Link(asyncio.Protocol):
    """The connection. ``on_hello`` gets it once the agent has shown the nonce; it closes what shows another."""

    def __init__(self, nonce: str, on_hello: Callable[[Link], None], on_refusal: Callable[[Link, str], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._nonce = nonce.encode()
        self._on_hello, self._on_refusal = on_hello, on_refusal
        self._decoder = wire.Decoder()
        self._transport: asyncio.Transport | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._relays: dict[int, Exchange] = {}
        self._highest_relay = 0
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self.boot: bytes | None = None
        """Differs in every start of an agent; None until it said who it is."""
        self.on_relay: Callable[[int], Exchange] | None = None
        self.on_frame: Callable[[], None] = lambda: None
        self.lost: asyncio.Future[str] = self.loop.create_future()
        self.heard = self.loop.time()
        """When anything arrived last."""

    # Requests

    def run(
        self,
        what: str,
        operation: str,
        argv: list[bytes],
        *,
        room: int,
        timeout: float,
        take: Callable[[Stream, bytes], None],
        limit: int | None = None,
        env: list[bytes] | None = None,
        cwd: str = "/",
        number: int = 0,
        key: str = "",
        stdin: bytes = b"",
        more_input: bool = False,
    ) -> Exchange:
        """Ask for a job. ``room``: bytes of output that may come; ``limit``: what the agent is told of it.

        Raises ``SandboxLost`` if the connection has ended, ``ValueError`` for NUL bytes, ``CommandNotFound`` for a
        command line that is too long.
        """
        self.check()
        exchange = Exchange(self, self._next(), what, room, take)
        inline = b"" if len(stdin) > WINDOW else stdin
        payload = wire.pack(
            operation.encode(),
            wire.pack_strings(argv),
            wire.pack_strings(env or []),
            os.fsencode(cwd),
            float(timeout),
            room if limit is None else limit,
            number,
            key.encode(),
            inline,
            int(not more_input and inline == stdin),
        )
        if len(payload) > wire.MAX_PAYLOAD:
            raise CommandNotFound(f"cannot run {what}: its arguments and environment are {len(payload)} bytes long")
        self._exchanges[exchange.id] = exchange
        exchange.used(len(inline))
        self.send(Kind.RUN, exchange.id, payload)
        exchange.watch(timeout)
        if inline != stdin:
            exchange.feed(stdin)
            if not more_input:
                exchange.end_input()
        return exchange

    async def ping(self, timeout: float) -> float:
        """Seconds of a round trip. Raises ``asyncio.TimeoutError``, ``SandboxLost``."""
        self.check()
        start = self.loop.time()
        id = self._next()
        pong = self._pings[id] = self.loop.create_future()
        self.send(Kind.PING, id)
        try:
            await asyncio.wait_for(asyncio.shield(pong), timeout)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            # It may still come, and must not count as an answer to nothing.
            pong.cancel()
            raise
        return self.loop.time() - start

    def nudge(self) -> None:
        """Let the agent know that its host is there, unless an earlier word is still on its way."""
        if self._transport is not None and not self._pings and self._transport.get_write_buffer_size() == 0:
            id = self._next()
            self._pings[id] = self.loop.create_future()
            self.send(Kind.PING, id)

    def accept_relays(self, on_relay: Callable[[int], Exchange]) -> None:
        self.on_relay = on_relay
        self.send(Kind.RELAY, 0)

    def settle_relay(self, exchange: Exchange, *, closed: bool = False) -> None:
        """Forget a relayed connection that has ended both ways, or is closed."""
        if closed or (exchange.output_ended and exchange.input_ended):
            self._relays.pop(exchange.id, None)
            exchange.end(Done(0, 0, 0, 0.0, b"", b""))

    def check(self) -> None:
        """Raises ``SandboxLost`` once the connection has ended."""
        if self.lost.done():
            raise self._gone(self.lost.result())

    def send(self, kind: Kind, id: int, payload: bytes = b"") -> None:
        if self._transport is not None and not self.lost.done():
            self._transport.write(wire.encode(kind, id, payload))

    def _next(self) -> int:
        while True:
            self._last = self._last % (wire.RELAYS - 1) + 1
            if self._last not in self._exchanges and self._last not in self._pings:
                return self._last

    # Frames

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self.lost.done():
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        try:
            for frame in self._decoder.feed(data):
                self._handle(frame)
                if self.lost.done():
                    return
        except ProtocolError as error:
            if self.boot is None:
                self._refuse(str(error))
            else:
                self.drop("agent_dead", error)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.boot is None and not self.lost.done():
            self._refuse("it said nothing before it went")
        else:
            self.drop("agent_dead")

    def _handle(self, frame: Frame) -> None:
        kind, id, payload = frame.kind, frame.id, frame.payload
        if self.boot is None:
            self._greet(frame)
        elif kind == Kind.PONG:
            pong = self._pings.pop(id, None)
            if pong is None:
                raise ProtocolError("the agent answered a ping that was not sent")
            if not pong.done():
                pong.set_result(None)
        elif kind == Kind.OPEN:
            self._open(id)
        elif id >= wire.RELAYS:
            exchange = self._relays.get(id)
            if exchange is not None:
                self._relay(exchange, kind, payload)
            elif id > self._highest_relay:
                raise ProtocolError("the agent speaks of a relayed connection that it did not open")
        else:
            exchange = self._exchanges.get(id)
            if exchange is None:
                raise ProtocolError("the agent answered a request that does not wait for an answer")
            self._answer(exchange, kind, payload)

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise ProtocolError("it did not say who it is")
        version, nonce, boot = wire.unpack(frame.payload, "ibb")
        if version != wire.VERSION:
            raise ProtocolError(f"it speaks version {version} of the protocol, not {wire.VERSION}")
        if not hmac.compare_digest(nonce, self._nonce):
            raise ProtocolError("it showed a wrong nonce")
        if len(boot) > 64:
            raise ProtocolError("its boot id is too long")
        self.boot = boot
        self._on_hello(self)

    def _refuse(self, why: str) -> None:
        self.lost.set_result("agent_dead")
        if self._transport is not None:
            self._transport.abort()
        self._on_refusal(self, why)

    def _answer(self, exchange: Exchange, kind: int, payload: bytes) -> None:
        if kind == Kind.OUTPUT:
            exchange.output("stdout", payload)
        elif kind == Kind.ERRORS:
            exchange.output("stderr", payload)
        elif kind == Kind.CREDIT:
            exchange.credit(wire.unpack(payload, "i")[0])
        elif kind == Kind.INPUT_END:
            exchange.break_input()
        elif kind == Kind.STARTED:
            (pid,) = wire.unpack(payload, "i")
            if exchange.started.done():
                raise ProtocolError("the agent started one program twice")
            exchange.started.set_result(pid)
        elif kind == Kind.DONE:
            done = Done(*wire.unpack(payload, "iiifbb"))
            if not (-1 <= done.code <= 255 and 0 <= done.signal <= 64 and 0 <= done.flags < 16 and done.duration >= 0):
                raise ProtocolError(f"the agent reported an impossible end of: {exchange.what}")
            exchange.output("stdout", done.stdout)
            exchange.output("stderr", done.stderr)
            del self._exchanges[exchange.id]
            exchange.end(done)
        elif kind == Kind.FAIL:
            error = failure(exchange.what, *wire.unpack(payload, "ii"))
            del self._exchanges[exchange.id]
            exchange.end(error)
        else:
            raise ProtocolError(f"the agent sent a frame of kind {kind}, which only hosts send")

    def _open(self, id: int) -> None:
        if self.on_relay is None or id < wire.RELAYS or id in self._relays or len(self._relays) >= _MAX_RELAYS:
            raise ProtocolError("the agent opened a relayed connection that it may not open")
        self._highest_relay = max(self._highest_relay, id)
        self._relays[id] = self.on_relay(id)

    def _relay(self, exchange: Exchange, kind: int, payload: bytes) -> None:
        if exchange.output_ended and kind in (Kind.OUTPUT, Kind.OUTPUT_END):
            raise ProtocolError("the agent sent more of a relayed connection after its end")
        if kind == Kind.OUTPUT:
            exchange.output("stdout", payload)
        elif kind == Kind.OUTPUT_END:
            exchange.end_output()
        elif kind == Kind.CREDIT:
            exchange.credit(wire.unpack(payload, "i")[0])
        elif kind == Kind.INPUT_END:
            exchange.break_input()
        else:
            raise ProtocolError(f"the agent sent a frame of kind {kind} for a relayed connection")
        self.settle_relay(exchange)

    # The end

    def drop(self, reason: str, error: AgentkitError | None = None) -> None:
        """End the connection and everything that waits on it. Twice is fine: the first reason stays."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        waiting = [*self._exchanges.values(), *self._relays.values()]
        self._exchanges.clear()
        self._relays.clear()
        for exchange in waiting:
            exchange.end(error or self._gone(reason, exchange.what))
        for pong in self._pings.values():
            if not pong.done():
                pong.add_done_callback(_seen)
                pong.set_exception(error or self._gone(reason))
        self._pings.clear()

    @staticmethod
    def _gone(reason: str, what: str = "") -> SandboxLost:
        during = f" during: {what}" if what else ""
        if reason == "closed":
            return SandboxLost(f"the connection to the sandbox was closed{during}", reason=reason)
        return SandboxLost(f"the sandbox went away ({reason}){during}; its effects so far are unknown", reason=reason)


def failure(what: str, code: int, number: int) -> AgentkitError:
    """The error that a ``FAIL`` stands for. Raises ``ProtocolError`` for a code that does not exist."""
    if code not in _FAILURES:
        raise ProtocolError(f"the agent failed with the unknown code {code}")
    kind, text = _FAILURES[code]
    reason = f": {os.strerror(number)}" if 0 < number < 200 and code != Failure.KILLED else ""
    details: dict[str, Any] = {"errno": number} if reason else {}
    if code == Failure.KILLED:
        details["signal"] = number
    error = kind(text.format(what=what) + reason, **details)
    if code == Failure.KILLED:
        error.side_effects = "maybe"
    if code == Failure.FORGOTTEN:
        error.side_effects = "done"
    return error


def _seen(future: asyncio.Future[Any]) -> None:
    # Nobody need wait for it any more; an exception in it is not news then.
    if not future.cancelled():
        future.exception()
