"""What flows through an agent's connection: a running command, and connections relayed out of the sandbox.

Invariant: whoever reads sets the pace; no more waits here than the window that was granted, and the program or peer on
the other side is held back beyond it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from agentkit.sandboxes import wire
from agentkit.sandboxes.agent_link import Done, Exchange
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.types import ExecResult, Stream
from agentkit.sandboxes.wire import Kind

_TIMED_OUT, _TRUNCATED, _OOM_KILLED, _TAINTED = 1, 2, 4, 8


class Flow:
    """The output of one exchange, read as it comes: ``async for stream, data in flow``."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self._moved = asyncio.Event()
        self._owed = 0
        self._exchange: Exchange | None = None

    def attach(self, exchange: Exchange) -> None:
        self._exchange = exchange
        exchange.done.add_done_callback(lambda _: self._moved.set())
        exchange.on_output_end = self._moved.set

    def take(self, stream: Stream, data: bytes) -> None:
        if data:
            self._chunks.append((stream, data))
            self._moved.set()

    def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        return self

    async def __anext__(self) -> tuple[Stream, bytes]:
        """Raises ``SandboxLost`` when what came before the loss was read."""
        exchange = self._exchange
        assert exchange is not None
        while not self._chunks:
            if exchange.done.done():
                exchange.done.result()
                raise StopAsyncIteration
            if exchange.output_ended:
                raise StopAsyncIteration
            self._moved.clear()
            await self._moved.wait()
        stream, data = self._chunks.popleft()
        self._owed += len(data)
        # A word for every chunk would be many; one when the window empties comes too late.
        if self._owed * 4 >= self._window or not self._chunks:
            exchange.grant(self._owed)
            self._owed = 0
        return stream, data


class AgentProcess(Process):
    """A command that an agent runs."""

    def __init__(self, exchange: Exchange, flow: Flow, limit: int) -> None:
        self._exchange, self._flow = exchange, flow
        self._kept: dict[Stream, Capture] = {"stdout": Capture(limit), "stderr": Capture(limit)}
        self._readers = 0

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        self._readers += 1
        try:
            async for stream, data in self._flow:
                yield stream, data
        finally:
            self._readers -= 1

    async def write(self, data: bytes) -> None:
        self._exchange.feed(data)
        await self._exchange.drained()

    async def close_stdin(self) -> None:
        self._exchange.end_input()

    async def kill(self, signal: int = 9) -> None:
        self._exchange.send(Kind.SIGNAL, wire.pack(signal))

    async def wait(self) -> ExecResult:
        """How it ended. Output that nobody iterates over is collected meanwhile, its beginning and end."""
        if not self._readers:
            async for stream, data in self._flow:
                self._kept[stream].feed(data)
        done = await asyncio.shield(self._exchange.done)
        return result(done, self._kept["stdout"], self._kept["stderr"])


class RelayStream:
    """A connection that something in the sandbox made to the relay port. Each direction ends for itself."""

    def __init__(self, exchange: Exchange, flow: Flow, settle: Callable[[bool], None]) -> None:
        self._exchange, self._flow, self._settle = exchange, flow, settle

    async def read(self) -> bytes:
        """The next bytes; none when the other side has ended. Raises ``SandboxLost``."""
        async for _, data in self._flow:
            return data
        return b""

    async def write(self, data: bytes) -> None:
        """Returns when the bytes are on their way. Raises ``BrokenPipeError``, ``SandboxLost``."""
        self._exchange.feed(data)
        await self._exchange.drained()

    def end(self) -> None:
        """Nothing more will be written; what was written still arrives."""
        self._exchange.end_input()
        self._settle(False)

    def close(self) -> None:
        """Drop the connection, and what has not arrived yet with it. Twice is fine."""
        self._exchange.send(Kind.CANCEL)
        self._exchange.break_input()
        self._settle(True)


def result(done: Done, stdout: Capture, stderr: Capture) -> ExecResult:
    """What an agent's numbers mean."""
    timed_out = bool(done.flags & _TIMED_OUT)
    return ExecResult(
        exit_code=None if timed_out or done.code < 0 else done.code,
        stdout_bytes=stdout.value(),
        stderr_bytes=stderr.value(),
        duration=done.duration,
        timed_out=timed_out,
        truncated=bool(done.flags & _TRUNCATED) or stdout.truncated or stderr.truncated,
        oom_killed=bool(done.flags & _OOM_KILLED),
        signal=done.signal or None,
        tainted=bool(done.flags & _TAINTED),
    )
