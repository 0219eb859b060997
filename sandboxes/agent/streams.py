"""Streams over an agent's connection: running commands, and connections relayed out of the sandbox.

Invariant: at most the granted window is buffered; the program or peer is held back until the reader continues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.connection import Call, JobResult
from agentkit.sandboxes.agent.protocol import Kind
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.output import Capture
from agentkit.sandboxes.types import ExecResult, Stream

_TIMED_OUT, _TRUNCATED, _OOM_KILLED, _TAINTED = 1, 2, 4, 8


class OutputQueue:
    """The output of one call, as an asynchronous iterator."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self._moved = asyncio.Event()
        self._owed = 0
        self._call: Call | None = None

    def attach(self, call: Call) -> None:
        self._call = call
        call.done.add_done_callback(lambda _: self._moved.set())
        call.on_output_end = self._moved.set

    def take(self, stream: Stream, data: bytes) -> None:
        if data:
            self._chunks.append((stream, data))
            self._moved.set()

    def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        return self

    async def __anext__(self) -> tuple[Stream, bytes]:
        """Raises ``SandboxLost`` after the output that arrived before the loss."""
        call = self._call
        assert call is not None
        while not self._chunks:
            if call.done.done():
                call.done.result()
                raise StopAsyncIteration
            if call.output_ended:
                raise StopAsyncIteration
            self._moved.clear()
            await self._moved.wait()
        stream, data = self._chunks.popleft()
        self._owed += len(data)
        # Not for every chunk, and not only when the window is empty.
        if self._owed * 4 >= self._window or not self._chunks:
            call.grant(self._owed)
            self._owed = 0
        return stream, data


class AgentProcess(Process):
    """A running command."""

    def __init__(self, call: Call, output: OutputQueue, limit: int) -> None:
        self._call, self._output = call, output
        self._kept: dict[Stream, Capture] = {"stdout": Capture(limit), "stderr": Capture(limit)}
        self._readers = 0

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        self._readers += 1
        try:
            async for stream, data in self._output:
                yield stream, data
        finally:
            self._readers -= 1

    async def write(self, data: bytes) -> None:
        self._call.feed(data)
        await self._call.drained()

    async def close_stdin(self) -> None:
        self._call.end_input()

    async def kill(self, signal: int = 9) -> None:
        self._call.send(Kind.SIGNAL, protocol.pack(signal))

    async def wait(self) -> ExecResult:
        """Wait for the end. Without an iterator, the beginning and end of the output are collected."""
        if not self._readers:
            async for stream, data in self._output:
                self._kept[stream].feed(data)
        done = await asyncio.shield(self._call.done)
        return result(done, self._kept["stdout"], self._kept["stderr"])


class RelayStream:
    """A connection to the relay port in the sandbox. The directions end independently."""

    def __init__(self, call: Call, output: OutputQueue, settle: Callable[[bool], None]) -> None:
        self._call, self._output, self._settle = call, output, settle

    async def read(self) -> bytes:
        """Return the next bytes; empty at the end. Raises ``SandboxLost``."""
        async for _, data in self._output:
            return data
        return b""

    async def write(self, data: bytes) -> None:
        """Send bytes; return when they are sent. Raises ``BrokenPipeError``, ``SandboxLost``."""
        self._call.feed(data)
        await self._call.drained()

    def end(self) -> None:
        """Send the end of the stream."""
        self._call.end_input()
        self._settle(False)

    def close(self) -> None:
        """Drop the connection and the data in transit."""
        self._call.send(Kind.CANCEL)
        self._call.break_input()
        self._settle(True)


def result(done: JobResult, stdout: Capture, stderr: Capture) -> ExecResult:
    """Convert an agent's result."""
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
