"""The host's end of a connection to an agent: calls out, untrusted frames in.

Invariant: memory is bounded: each call has a window of output that the agent may send. A frame that is malformed,
belongs to no call, answers a call twice or exceeds its window ends the connection. Nothing in a frame becomes a class,
a path or a message. When the connection ends, all calls end.
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
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.protocol import Failure, Frame, Kind
from agentkit.sandboxes.tasks import retrieve
from agentkit.sandboxes.types import Stream

WINDOW = 1 << 18
"""Bytes of input that an agent buffers for one job or relayed connection."""
_OVERDUE = 10.0
"""Seconds after its timeout within which a job must have been answered."""
_CANCEL = 4.0
_MAX_RELAYS = 128

_FAILURES: dict[int, tuple[type[SandboxError], str]] = {
    Failure.COMMAND: (CommandNotFound, "cannot run {what}"),
    Failure.PATH: (PathError, "cannot {what}"),
    Failure.TOO_LARGE: (FileTooLarge, "cannot {what}: it is larger than the limit of the call"),
    Failure.DISK_FULL: (DiskFull, "cannot {what}"),
    Failure.RESOURCES: (ResourcesExhausted, "the sandbox has no process, memory or open file left to {what}"),
    Failure.BAD_REQUEST: (SandboxError, "the agent refused to {what}"),
    Failure.FORGOTTEN: (SandboxError, "{what} already ran with this idempotency key; its result is no longer stored"),
    Failure.KILLED: (
        SandboxError,
        "cannot {what}: its process was killed by a program in the sandbox or by the memory limit",
    ),
    Failure.INTERNAL: (SandboxError, "the agent failed to {what}; check that the sandbox's Python is complete"),
}


@dataclass(frozen=True)
class JobResult:
    """How a job ended, as reported by the agent, with the rest of its output."""

    code: int
    signal: int
    flags: int
    duration: float
    stdout: bytes
    stderr: bytes


class Call:
    """One request or one relayed connection, with flow control in both directions."""

    def __init__(
        self, connection: AgentConnection, id: int, what: str, window: int, take: Callable[[Stream, bytes], None]
    ) -> None:
        self._connection, self.id, self.what, self.take = connection, id, what, take
        self._window = window
        self.done: asyncio.Future[JobResult] = connection.loop.create_future()
        self.done.add_done_callback(retrieve)
        self.resumes = False
        """The call takes over a command that runs already."""
        self.started: asyncio.Future[int] = connection.loop.create_future()
        self.started.add_done_callback(retrieve)
        self._input: deque[memoryview] = deque()
        self._input_window = WINDOW
        self._input_ended = self.input_broken = self.output_ended = False
        self.on_output_end: Callable[[], None] = lambda: None
        self._input_moved = asyncio.Event()
        self._watchdog: asyncio.TimerHandle | None = None

    # To the agent

    def grant(self, count: int) -> None:
        """Allow ``count`` more bytes of output."""
        if not self.done.done():
            self._window += count
            self._connection.send(Kind.CREDIT, self.id, protocol.pack(count))

    def feed(self, data: bytes | memoryview) -> None:
        """Queue input, which is sent as the agent's window allows. Does not wait."""
        if data and not self.input_broken:
            self._input.append(memoryview(data))
            self._pump()

    async def drained(self) -> None:
        """Wait until all input is sent. Raises ``BrokenPipeError`` if the program reads no more, ``SandboxLost``."""
        while self._input and not self.done.done():
            self._input_moved.clear()
            await self._input_moved.wait()
        if self.done.done() and self.done.exception() is not None:
            self.done.result()
        if self.input_broken or self._input:
            raise BrokenPipeError(errno.EPIPE, f"{self.what}: the program reads no more input")

    def end_input(self) -> None:
        """Close the input once all of it is sent."""
        if not self._input_ended:
            self._input_ended = True
            self._pump()

    @property
    def input_ended(self) -> bool:
        """Whether no more input will be sent."""
        return self.input_broken or (self._input_ended and not self._input)

    def used(self, count: int) -> None:
        """Count input that was part of the request."""
        self._input_window -= count

    def _pump(self) -> None:
        while self._input and self._input_window > 0:
            head = self._input[0]
            piece = head[: min(self._input_window, protocol.CHUNK)]
            self._connection.send(Kind.INPUT, self.id, bytes(piece))
            self._input_window -= len(piece)
            if len(piece) == len(head):
                self._input.popleft()
            else:
                self._input[0] = head[len(piece) :]
        if not self._input:
            self._input_moved.set()
            if self._input_ended and not self.input_broken and not self.done.done():
                self._connection.send(Kind.INPUT_END, self.id)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        if not self.done.done():
            self._connection.send(kind, self.id, payload)

    def watch(self, timeout: float) -> None:
        """End the connection if there is no answer within ``timeout`` and some more seconds."""
        self._watchdog = self._connection.loop.call_later(timeout + _OVERDUE, self._overdue, timeout)

    def _overdue(self, timeout: float) -> None:
        message = f"the agent did not answer {timeout + _OVERDUE:.0f} s after it was asked to {self.what}"
        self._connection.drop("agent_dead", SandboxLost(message, reason="agent_dead"))

    async def cancel(self) -> None:
        """Kill the job and wait until it has ended, at most ``_CANCEL`` seconds."""
        if not self.done.done():
            self.send(Kind.CANCEL)
            await asyncio.wait([self.done], timeout=_CANCEL)

    # From the agent

    def output(self, stream: Stream, data: bytes) -> None:
        self._window -= len(data)
        if self._window < 0:
            raise ProtocolError(f"the agent sent more output than its window allows for: {self.what}")
        self.take(stream, data)

    def end_output(self) -> None:
        """A relayed connection sends no more; it may still receive."""
        self.output_ended = True
        self.on_output_end()

    def credit(self, count: int) -> None:
        if not 0 < count <= WINDOW - self._input_window:
            raise ProtocolError(f"the agent acknowledged {count} bytes of input that were not sent")
        self._input_window += count
        self._pump()

    def break_input(self) -> None:
        self.input_broken = True
        self._input.clear()
        self._input_moved.set()

    def end(self, done: JobResult | AgentkitError) -> None:
        """Complete the call with its result or an error."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.done.done():
            return
        if isinstance(done, JobResult):
            self.done.set_result(done)
            if not self.started.done():
                self.started.cancel()
        else:
            self.done.set_exception(done)
            if not self.started.done():
                self.started.set_exception(done)
        self._input_moved.set()


class AgentConnection(asyncio.Protocol):
    """The connection. ``on_hello`` is called once the agent has sent the right nonce, ``on_refusal`` otherwise."""

    def __init__(
        self,
        nonce: str,
        on_hello: Callable[[AgentConnection], None],
        on_refusal: Callable[[AgentConnection, str], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._nonce = nonce.encode()
        self._on_hello, self._on_refusal = on_hello, on_refusal
        self._decoder = protocol.Decoder()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, Call] = {}
        self._relays: dict[int, Call] = {}
        self._highest_relay = 0
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._last = 0
        self.boot: bytes | None = None
        """Unique for each start of an agent; None until its first frame."""
        self.on_relay: Callable[[int], Call] | None = None
        self.on_frame: Callable[[], None] = lambda: None
        self.lost: asyncio.Future[str] = self.loop.create_future()
        self.heard = self.loop.time()
        """Time of the last received data."""

    # Requests

    def run(
        self,
        what: str,
        operation: str,
        argv: list[bytes],
        *,
        window: int,
        timeout: float,
        take: Callable[[Stream, bytes], None],
        limit: int | None = None,
        env: list[bytes] | None = None,
        cwd: str = "/",
        number: int = 0,
        key: str = "",
        stdin: bytes = b"",
        more_input: bool = False,
    ) -> Call:
        """Start a job. ``window``: bytes of output that may arrive; ``limit``: the limit in the request.

        Raises ``SandboxLost`` if the connection has ended, ``ValueError`` for NUL bytes, ``CommandNotFound`` for a
        command line that is too long.
        """
        self.check()
        call = Call(self, self._next(), what, window, take)
        inline = b"" if len(stdin) > WINDOW else stdin
        payload = protocol.pack(
            operation.encode(),
            protocol.pack_strings(argv),
            protocol.pack_strings(env or []),
            os.fsencode(cwd),
            float(timeout),
            window if limit is None else limit,
            number,
            key.encode(),
            inline,
            int(not more_input and inline == stdin),
        )
        if len(payload) > protocol.MAX_PAYLOAD:
            raise CommandNotFound(f"cannot run {what}: its arguments and environment are {len(payload)} bytes long")
        call.resumes = operation == "resume"
        self._calls[call.id] = call
        call.used(len(inline))
        self.send(Kind.RUN, call.id, payload)
        call.watch(timeout)
        if inline != stdin:
            call.feed(stdin)
            if not more_input:
                call.end_input()
        return call

    async def ping(self, timeout: float) -> float:
        """Return the seconds of a round trip. Raises ``asyncio.TimeoutError``, ``SandboxLost``."""
        self.check()
        start = self.loop.time()
        id = self._next()
        pong = self._pings[id] = self.loop.create_future()
        self.send(Kind.PING, id)
        try:
            await asyncio.wait_for(asyncio.shield(pong), timeout)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            # A late answer must not count as unexpected.
            pong.cancel()
            raise
        return self.loop.time() - start

    def nudge(self) -> None:
        """Send a ping without waiting, unless earlier data is still being sent."""
        if self._transport is not None and not self._pings and self._transport.get_write_buffer_size() == 0:
            id = self._next()
            self._pings[id] = self.loop.create_future()
            self.send(Kind.PING, id)

    def accept_relays(self, on_relay: Callable[[int], Call]) -> None:
        self.on_relay = on_relay
        self.send(Kind.RELAY, 0)

    def settle_relay(self, call: Call, *, closed: bool = False) -> None:
        """Remove a relayed connection that has ended in both directions or is closed."""
        if closed or (call.output_ended and call.input_ended):
            self._relays.pop(call.id, None)
            call.end(JobResult(0, 0, 0, 0.0, b"", b""))

    def check(self) -> None:
        """Raise ``SandboxLost`` if the connection has ended."""
        if self.lost.done():
            raise self._gone(self.lost.result())

    def send(self, kind: Kind, id: int, payload: bytes = b"") -> None:
        if self._transport is not None and not self.lost.done():
            self._transport.write(protocol.encode(kind, id, payload))

    def _next(self) -> int:
        while True:
            self._last = self._last % (protocol.RELAYS - 1) + 1
            if self._last not in self._calls and self._last not in self._pings:
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
            self._refuse("it closed the connection without a greeting")
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
        elif id >= protocol.RELAYS:
            call = self._relays.get(id)
            if call is not None:
                self._relay(call, kind, payload)
            elif id > self._highest_relay:
                raise ProtocolError("the agent sent a frame of an unknown relayed connection")
        else:
            call = self._calls.get(id)
            if call is None:
                raise ProtocolError("the agent answered an unknown request")
            self._answer(call, kind, payload)

    def _greet(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise ProtocolError("its first frame is not a greeting")
        version, nonce, boot = protocol.unpack(frame.payload, "ibb")
        if version != protocol.VERSION:
            raise ProtocolError(f"it uses version {version} of the protocol, not {protocol.VERSION}")
        if not hmac.compare_digest(nonce, self._nonce):
            raise ProtocolError("its nonce is wrong")
        if len(boot) > 64:
            raise ProtocolError("its boot id is too long")
        self.boot = boot
        self._on_hello(self)

    def _refuse(self, why: str) -> None:
        self.lost.set_result("agent_dead")
        if self._transport is not None:
            self._transport.abort()
        self._on_refusal(self, why)

    def _answer(self, call: Call, kind: int, payload: bytes) -> None:
        if kind == Kind.OUTPUT:
            call.output("stdout", payload)
        elif kind == Kind.ERRORS:
            call.output("stderr", payload)
        elif kind == Kind.CREDIT:
            call.credit(protocol.unpack(payload, "i")[0])
        elif kind == Kind.INPUT_END:
            call.break_input()
        elif kind == Kind.STARTED:
            number, waiting = protocol.unpack(payload, "ii") if call.resumes else (*protocol.unpack(payload, "i"), 0)
            if call.started.done():
                raise ProtocolError("the agent started one program twice")
            if not 0 <= waiting <= WINDOW:
                raise ProtocolError(f"the agent reported {waiting} bytes of waiting input")
            call.used(waiting)
            call.started.set_result(number)
        elif kind == Kind.DONE:
            done = JobResult(*protocol.unpack(payload, "iiifbb"))
            if not (-1 <= done.code <= 255 and 0 <= done.signal <= 64 and 0 <= done.flags < 16 and done.duration >= 0):
                raise ProtocolError(f"the agent reported an impossible end of: {call.what}")
            call.output("stdout", done.stdout)
            call.output("stderr", done.stderr)
            del self._calls[call.id]
            call.end(done)
        elif kind == Kind.FAIL:
            error = failure(call.what, *protocol.unpack(payload, "ii"))
            del self._calls[call.id]
            call.end(error)
        else:
            raise ProtocolError(f"the agent sent a frame of kind {kind}, which is for hosts only")

    def _open(self, id: int) -> None:
        if self.on_relay is None or id < protocol.RELAYS or id in self._relays or len(self._relays) >= _MAX_RELAYS:
            raise ProtocolError("the agent opened a relayed connection without permission")
        self._highest_relay = max(self._highest_relay, id)
        self._relays[id] = self.on_relay(id)

    def _relay(self, call: Call, kind: int, payload: bytes) -> None:
        if call.output_ended and kind in (Kind.OUTPUT, Kind.OUTPUT_END):
            raise ProtocolError("the agent sent data of a relayed connection after its end")
        if kind == Kind.OUTPUT:
            call.output("stdout", payload)
        elif kind == Kind.OUTPUT_END:
            call.end_output()
        elif kind == Kind.CREDIT:
            call.credit(protocol.unpack(payload, "i")[0])
        elif kind == Kind.INPUT_END:
            call.break_input()
        else:
            raise ProtocolError(f"the agent sent a frame of kind {kind} for a relayed connection")
        self.settle_relay(call)

    # End

    def drop(self, reason: str, error: AgentkitError | None = None) -> None:
        """End the connection and all calls. The first reason is kept."""
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if self._transport is not None:
            self._transport.abort()
        waiting = [*self._calls.values(), *self._relays.values()]
        self._calls.clear()
        self._relays.clear()
        for call in waiting:
            call.end(error or self._gone(reason, call.what))
        for pong in self._pings.values():
            if not pong.done():
                pong.add_done_callback(retrieve)
                pong.set_exception(error or self._gone(reason))
        self._pings.clear()

    @staticmethod
    def _gone(reason: str, what: str = "") -> SandboxLost:
        during = f" during: {what}" if what else ""
        if reason == "closed":
            return SandboxLost(f"the connection to the sandbox was closed{during}", reason=reason)
        return SandboxLost(f"the sandbox went away ({reason}){during}; its effects so far are unknown", reason=reason)


def failure(what: str, code: int, number: int) -> AgentkitError:
    """Return the error of a ``FAIL`` frame. Raises ``ProtocolError`` for an unknown code."""
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
