"""Commands, files and processes of a sandbox on a server.

Invariant: each call ends with a result, a typed error or the loss of the channel, as ``Channel`` specifies. A command
is sent again only if it has an idempotency key, and at most once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from agentkit.errors import EngineUnavailable, ProtocolError, SandboxError, SandboxLost
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.protocol import Decoder, Frame, Kind
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.backends.remote.connection import ServerConnection
from agentkit.sandboxes.backends.remote.http import Response
from agentkit.sandboxes.output import Capture
from agentkit.sandboxes.server.protocol import pack_arguments, pack_request, unpack, unpack_error, unpack_result
from agentkit.sandboxes.tasks import finished, retrieve
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats, Stream

T = TypeVar("T")

_MARGIN = 1 << 16
"""Bytes of a response beyond the data that was requested."""
_FILE_TIMEOUT = 30.0
_REMOVE_TIMEOUT = 600.0
_LAST_RESPONSE = 2.0
"""Seconds that a call waits for its response after its sandbox was lost."""
_RESTART = ("restarting", "resume")
"""Details of the errors that a restart of the server causes."""
_UNEXPLAINED = ("closed", "engine_down", "hung", "frozen")
"""Reasons of a loss about which the server knows nothing more."""


class RemoteChannel(Channel):
    """The channel of one generation of a sandbox on ``server``."""

    def __init__(self, server: ServerConnection, id: str, key: str, isolation: str, resumes: bool = False) -> None:
        self.isolation = isolation
        self._resumes = resumes
        """Running commands survive a restart of the server."""
        self.lost = asyncio.get_running_loop().create_future()
        self._server = server
        self._id = id
        self._key = key
        self._path = f"/v1/channels/{key}"
        server.channels[key] = self.lose

    @property
    def host_silent(self) -> bool:
        return self._server.health.state != "up"

    async def exec(self, request: ExecRequest) -> ExecResult:
        async def work() -> ExecResult:
            limit = 2 * request.output_limit + _MARGIN
            content = pack_request(request)
            return unpack_result(
                await self._server.call("POST", f"{self._path}/exec", content, timeout=request.timeout, limit=limit)
            )

        try:
            return await self.guarded(work())
        except EngineUnavailable:
            if request.idempotency_key is None:
                raise
            return await self.guarded(work())

    async def spawn(self, request: ExecRequest) -> Process:
        if self._resumes and request.idempotency_key is None:
            request = dataclasses.replace(request, idempotency_key=secrets.token_hex(16))
        process = RemoteProcess(self, self._server, request, self._path)
        await self.guarded(process.start())
        return process

    async def read(self, path: str, limit: int) -> bytes:
        return await self.guarded(self._read(path, limit))

    async def write(self, path: str, data: bytes, mode: int) -> None:
        await self._call("write", path, mode, data)

    async def list(self, path: str) -> list[FileInfo]:
        return unpack(list[FileInfo], await self._call("list", path, limit=64 << 20))

    async def stat(self, path: str) -> FileInfo | None:
        return unpack(FileInfo | None, await self._call("stat", path))

    async def remove(self, path: str) -> None:
        await self._call("remove", path, timeout=_REMOVE_TIMEOUT)

    async def mkdir(self, path: str) -> None:
        await self._call("mkdir", path)

    async def stats(self) -> Stats:
        return unpack(Stats, await self._call("stats"))

    async def ping(self, timeout: float) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.wait_for(self._call("ping", "", timeout), timeout)
        return loop.time() - start

    async def close(self) -> None:
        self._server.channels.pop(self._key, None)
        self.lose("closed")

    async def guarded(self, work: Awaitable[T]) -> T:
        """Await ``work``; cancel it and raise ``SandboxLost`` when the channel is lost."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(retrieve)  # if the caller is cancelled, it does not see how the call ended
        try:
            await asyncio.wait({task, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.lost.result() not in _UNEXPLAINED:
                # The server knows the cause in detail and is about to send it.
                await asyncio.wait({task}, timeout=_LAST_RESPONSE)
        finally:
            if not task.done():
                task.cancel()
                # What was started is killed before the caller continues.
                await finished(asyncio.wait({task}))
        if not task.cancelled() and isinstance(task.exception(), EngineUnavailable):
            await self._server.verdict()
        if self.lost.done() and (task.cancelled() or isinstance(task.exception(), EngineUnavailable)):
            raise self.loss()
        return task.result()

    def loss(self) -> SandboxLost:
        reason = self.lost.result()
        return SandboxLost(f"sandbox {self._id} on {self._server.url} is lost: {reason}", reason=reason)

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def _read(self, path: str, limit: int) -> bytes:
        content, data = pack_arguments(path, limit), bytearray()
        async with self._server.exchange("POST", f"{self._path}/read", content, timeout=_FILE_TIMEOUT) as response:
            async for frame in _frames(response):
                if frame.kind == Kind.DONE:
                    return bytes(data)
                if frame.kind == Kind.FAIL:
                    raise unpack_error(frame.payload)
                data += frame.payload
                if frame.kind != Kind.OUTPUT or len(data) > limit:
                    raise ProtocolError(f"unexpected data from {self._server.url} for read {path}")
        raise ProtocolError(f"{self._server.url} did not send the end of {path}")

    async def _call(
        self,
        verb: str,
        path: str = "",
        number: float = 0.0,
        data: bytes = b"",
        *,
        timeout: float = _FILE_TIMEOUT,
        limit: int = _MARGIN,
    ) -> bytes:
        content = pack_arguments(path, number, data)
        call = self._server.call("POST", f"{self._path}/{verb}", content, timeout=timeout, limit=limit)
        return await self.guarded(call)


class RemoteProcess(Process):
    """A running command on a server. A task reads its frames, at most ``output_limit`` bytes ahead of the reader.

    When the server restarts, the command continues if it has an idempotency key. Both sides count the bytes of each
    stream, so that nothing is lost or repeated; if that is not possible, the command fails as cut by the restart.
    """

    def __init__(
        self, channel: RemoteChannel, server: ServerConnection, request: ExecRequest, channel_path: str
    ) -> None:
        self._channel = channel
        self._server = server
        self._request = request
        self._channel_path = channel_path
        self._received = {Kind.OUTPUT: 0, Kind.ERRORS: 0}
        self._sent = len(request.stdin)
        """Bytes of input that the command has taken."""
        self._fresh = True
        """The present response has not begun."""
        self._limit = max(request.output_limit, 1)
        self._path = ""
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self._buffered = 0
        self._changed = asyncio.Condition()
        self._end: ExecResult | Exception | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Return when the command runs."""
        self._reader = asyncio.ensure_future(self._read())
        try:
            await asyncio.shield(self._started)
        except BaseException:
            self._reader.cancel()  # disconnects, which kills the command
            await finished(asyncio.wait({self._reader}))
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._chunks or self._end is not None)
                if not self._chunks:
                    break
                chunk = self._chunks.popleft()
                self._buffered -= len(chunk[1])
                self._changed.notify_all()
            yield chunk
        if isinstance(self._end, Exception):
            raise self._end

    async def write(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), protocol.CHUNK):
                await self._write(data[start : start + protocol.CHUNK])

    async def _write(self, data: bytes) -> None:
        end = self._sent + len(data)
        while self._sent < end:  # again after a restart: what the command has not taken
            path = self._path
            try:
                await self._call("input", data[self._sent - end :])
                self._sent = end
            except EngineUnavailable as error:
                if not await self._resumed(path, error):
                    raise

    async def close_stdin(self) -> None:
        async with self._writing:
            await self._control("end")

    async def kill(self, signal: int = 9) -> None:
        await self._control("kill", number=signal)

    async def _control(self, verb: str, **query: Any) -> None:
        while True:
            path = self._path
            try:
                return await self._call(verb, **query)
            except EngineUnavailable as error:
                if not await self._resumed(path, error):
                    raise

    async def wait(self) -> ExecResult:
        stdout, stderr = Capture(self._limit), Capture(self._limit)
        async for stream, data in self:
            (stdout if stream == "stdout" else stderr).feed(data)
        assert isinstance(self._end, ExecResult)
        return dataclasses.replace(
            self._end,
            stdout_bytes=stdout.value(),
            stderr_bytes=stderr.value(),
            truncated=self._end.truncated or stdout.truncated or stderr.truncated,
        )

    async def _call(self, verb: str, content: bytes = b"", **query: Any) -> None:
        if isinstance(self._end, Exception):
            raise self._end
        await self._channel.guarded(
            self._server.call("POST", f"{self._path}/{verb}", content, timeout=self._request.timeout, **query)
        )

    async def _read(self) -> None:
        """Read the frames until the command or the connection ends."""
        end: ExecResult | Exception = ProtocolError(f"{self._server.url} did not send the result of a command")
        try:
            end = await self._read_stream("spawn")
            while isinstance(end, EngineUnavailable) and self._resumable(end) and self._started.done():
                counts = {"stdout": self._received[Kind.OUTPUT], "stderr": self._received[Kind.ERRORS]}
                resumed = await self._read_stream("resume", **counts)
                if self._fresh and not isinstance(resumed, EngineUnavailable):
                    break  # the sandbox does not know the command, or not its latest output
                end = resumed
        except asyncio.CancelledError:
            end = self._channel.loss() if self._channel.lost.done() else SandboxLost("the call was cancelled")
            raise
        finally:
            if isinstance(end, EngineUnavailable) and self._channel.lost.done():
                end = self._channel.loss()
            self._end = end
            if not self._started.done():
                failure = end if isinstance(end, Exception) else ProtocolError("the command was not started")
                self._started.set_exception(failure)
                self._started.exception()
            await finished(self._notify())

    async def _read_stream(self, verb: str, **query: Any) -> ExecResult | Exception:
        """Read the frames of one response; return how it ended."""
        self._fresh = True
        try:
            content, path = pack_request(self._request), f"{self._channel_path}/{verb}"
            async with self._server.exchange("POST", path, content, timeout=self._request.timeout, **query) as response:
                end = await self._read_frames(response)
            return end or ProtocolError(f"{self._server.url} did not send the result of a command")
        except EngineUnavailable as error:
            await self._server.verdict()
            return error
        except Exception as error:
            return error

    def _resumable(self, error: EngineUnavailable) -> bool:
        """Return whether ``error`` is a restart of the server over which the command continues."""
        return self._request.idempotency_key is not None and not error.details.keys().isdisjoint(_RESTART)

    async def _resumed(self, path: str, error: EngineUnavailable) -> bool:
        """Wait until the command, which was at ``path``, is resumed or has failed; return whether it is resumed."""
        if not self._resumable(error):
            return False
        async with self._changed:
            await self._changed.wait_for(lambda: self._path != path or self._end is not None)
        return self._path != path

    async def _read_frames(self, response: Response) -> ExecResult | Exception | None:
        async for frame in _frames(response):
            if frame.kind == Kind.DONE:
                return unpack_result(frame.payload)
            if frame.kind == Kind.FAIL:
                return unpack_error(frame.payload)
            await self._take(frame)
        return None

    async def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.STARTED and self._fresh:
            handle, _, taken = frame.payload.decode("ascii", "replace").partition(" ")
            await self._begin(f"/v1/processes/{handle}", int(taken or 0))
        elif frame.kind in (Kind.OUTPUT, Kind.ERRORS):
            async with self._changed:
                self._chunks.append(("stdout" if frame.kind == Kind.OUTPUT else "stderr", frame.payload))
                self._buffered += len(frame.payload)
                self._received[frame.kind] += len(frame.payload)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._buffered < self._limit)
        else:
            raise ProtocolError(f"unexpected frame of kind {frame.kind} from {self._server.url}")

    async def _begin(self, path: str, taken: int) -> None:
        """The command runs, or continues and has taken this number of bytes of input."""
        self._fresh = False
        if self._started.done():
            if taken < self._sent:
                raise SandboxError(
                    f"{self._sent - taken} bytes of input were lost in the restart of {self._server.url}"
                )
            self._sent = taken
        else:
            self._started.set_result(None)
            self._channel.lost.add_done_callback(self._on_lost)
        self._path = path
        await self._notify()

    def _on_lost(self, lost: asyncio.Future[str]) -> None:
        if lost.result() != "closed":
            self._reader.cancel()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _frames(response: Response) -> AsyncIterator[Frame]:
    decoder = Decoder()
    async for data in response:
        for frame in decoder.feed(data):
            yield frame
