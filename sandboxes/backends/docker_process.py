"""One command that runs by ``docker exec``: its output, its input, its end.

Invariant: it ends at the latest some seconds after its timeout, read or unread; its result is formed once and stays.
What it wrote is read by one reader at a time, and what one has read is not in the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
import time
from collections.abc import AsyncIterator
from typing import Protocol

from agentkit.errors import CommandNotFound, EngineUnavailable, ResourcesExhausted, SandboxError, SandboxLost
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.backends.docker_scripts import End, Trailer
from agentkit.sandboxes.backends.docker_stream import ExecStream
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.types import ExecRequest, ExecResult, Stats, Stream

_GRACE = 1.0
"""Seconds between the kill of a command and the end of reading its streams."""
_ALIVE = 20.0
"""Seconds that a living sandbox may take to run the shortest command."""
_PIECE = 1 << 18


class Home(Protocol):
    """The sandbox that a command runs in."""

    async def kill(self, nonce: str, signal: str = "KILL") -> bool:
        """Signal all processes of a command. Returns whether none survived (meant for KILL)."""
        ...

    async def exit_code(self, exec_id: str) -> int | None: ...

    async def gone(self) -> SandboxLost | None:
        """Why the sandbox, or the way to it, is gone, if it is."""
        ...

    async def ping(self, timeout: float) -> float: ...

    async def stats(self) -> Stats: ...

    def note_oom_kills(self, count: int | None) -> bool:
        """Whether the sandbox has had more processes killed for memory than was known of."""
        ...


class ExecProcess(Process):
    def __init__(
        self,
        home: Home,
        stream: ExecStream,
        exec_id: str,
        nonce: str,
        request: ExecRequest,
        began: float,
    ) -> None:
        self._home, self._stream, self._exec_id, self._nonce = home, stream, exec_id, nonce
        self._request, self._began, self._ended = request, began, 0.0
        self._trailers: dict[Stream, Trailer] = {"stdout": Trailer(nonce), "stderr": Trailer(nonce)}
        self._kept: dict[Stream, Capture] = {name: Capture(request.output_limit) for name in self._trailers}
        self._reading = asyncio.Lock()
        self._over = self._stdin_closed = self._timed_out = self._tainted = False
        self._conclusion: asyncio.Task[ExecResult] | None = None
        self._expiry = asyncio.ensure_future(self._expire())

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while (piece := await self._next()) is not None:
            yield piece

    async def write(self, data: bytes) -> None:
        if self._over or self._stdin_closed:
            raise BrokenPipeError(f"{self._request.argv[0]!r} reads no more input")
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                await self._stream.write(bytes(view[start : start + _PIECE]))
        except OSError as error:
            raise BrokenPipeError(f"{self._request.argv[0]!r} reads no more input") from error

    async def close_stdin(self) -> None:
        if not self._stdin_closed:
            self._stdin_closed = True
            self._stream.write_eof()

    async def feed(self, data: bytes) -> None:
        """All of the input and its end; a program need not read it."""
        with contextlib.suppress(BrokenPipeError):
            await self.write(data)
        await self.close_stdin()

    async def kill(self, signal: int = 9) -> None:
        if self._over:
            return
        if signal == signals.SIGKILL:
            await self.kill_tree()
        else:
            await self._home.kill(self._nonce, signals.Signals(signal).name.removeprefix("SIG"))

    async def kill_tree(self) -> None:
        """Kill everything that the command started; notes what survives."""
        if not await self._home.kill(self._nonce):
            self._tainted = True

    async def wait(self) -> ExecResult:
        while (piece := await self._next()) is not None:
            self._kept[piece[0]].feed(piece[1])
        if self._conclusion is None:
            self._conclusion = asyncio.ensure_future(self._conclude())
        return await asyncio.shield(self._conclusion)

    def drop(self) -> None:
        """Let go of the streams."""
        self._over = True
        if not self._timed_out:
            self._expiry.cancel()
        self._stream.close()

    async def _next(self) -> tuple[Stream, bytes] | None:
        """The next output of the command; None once it has ended."""
        async with self._reading:
            while not self._over:
                piece = await self._stream.read()
                if piece is None:
                    self._finish()
                    break
                name, data = piece
                data = self._trailers[name].feed(data)
                if all(trailer.found is not None for trailer in self._trailers.values()):
                    self._finish()
                if data:
                    return name, data
            for name, trailer in self._trailers.items():
                if rest := trailer.rest():
                    return name, rest
            return None

    def _finish(self) -> None:
        self._ended = time.monotonic()
        self.drop()

    async def _expire(self) -> None:
        await asyncio.sleep(max(0.0, self._began + self._request.timeout - time.monotonic()))
        self._timed_out = True
        await self.kill_tree()
        # With the command dead, its trailers or the end of its streams follow; unless something holds them open.
        await asyncio.sleep(_GRACE)
        self._stream.close()

    async def _conclude(self) -> ExecResult:
        said = self._trailers["stderr"].found
        if self._timed_out:
            await asyncio.wait({self._expiry})  # it may still be killing
            return self._result(None)
        if said is not None:
            end = End.parse(said)
            if end.problem:
                raise self._not_started(end)
            self._home.note_oom_kills(end.oom_kills)
            return self._result(end.code, end.oom)
        code = await self._code_without_trailer()
        if code < 128:  # the shell did not begin, or could not fork: what came is the engine's complaint, or nothing
            said = self._kept["stdout"].value()[-300:].decode("utf-8", "replace").strip()
            raise ResourcesExhausted(f"cannot run {self._request.argv[0]!r}: no process can be started: {said}")
        return self._result(code, code == 128 + signals.SIGKILL and await self._memory_ran_out())

    async def _code_without_trailer(self) -> int:
        """The shell that ran the command was killed, or the whole sandbox, or the engine went away.

        The engine may count a sandbox as running for a moment after its death: only what runs a command is alive.
        """
        what = repr(self._request.argv[0])
        for _ in range(3):
            try:
                await self._home.ping(_ALIVE)
            except (SandboxError, asyncio.TimeoutError):
                if (death := await self._death()) is not None:
                    raise self._with_output(death) from None
            else:
                if (code := await self._home.exit_code(self._exec_id)) is not None:
                    return code
                break
        else:
            raise self._with_output(SandboxLost(f"the sandbox did not answer while {what} ran", reason="engine_down"))
        await finished(self.kill_tree())
        raise SandboxError(f"the engine lost the streams of {what}, which still ran; it was killed")

    async def _death(self) -> SandboxLost | None:
        """Why the sandbox is gone, as soon as the engine knows."""
        for delay in (0.0, 0.1, 0.3, 1.0, 3.0):
            await asyncio.sleep(delay)
            with contextlib.suppress(EngineUnavailable):
                if (death := await self._home.gone()) is not None:
                    return death
        return None

    async def _memory_ran_out(self) -> bool:
        with contextlib.suppress(SandboxError):
            return self._home.note_oom_kills((await self._home.stats()).oom_kills)
        return False

    def _result(self, code: int | None, oom: bool = False) -> ExecResult:
        out, err = self._kept["stdout"], self._kept["stderr"]
        return ExecResult(
            exit_code=code,
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            duration=self._ended - self._began,
            timed_out=self._timed_out,
            truncated=out.truncated or err.truncated,
            oom_killed=oom,
            signal=code - 128 if code is not None and 128 < code <= 128 + 64 else None,
            tainted=self._tainted,
        )

    def _with_output(self, lost: SandboxLost) -> SandboxLost:
        lost.details.update(stdout=self._kept["stdout"].value(), stderr=self._kept["stderr"].value())
        return lost

    def _not_started(self, end: End) -> CommandNotFound:
        if end.problem == "cwd":
            return CommandNotFound(f"cannot run {self._request.argv[0]!r}: there is no directory {self._request.cwd!r}")
        return CommandNotFound(f"cannot run {self._request.argv[0]!r}: there is no such program in the sandbox")
