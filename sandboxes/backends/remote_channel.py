"""The hot path to a sandbox on a server: commands, files and running processes.

Invariant: each call ends with a result, a typed error, or the loss of the channel, as the promises of ``Channel`` have
it. A command is sent again only if it carries an idempotency key, and then once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict
from typing import Any, TypeVar

from agentkit.errors import EngineUnavailable, ProtocolError, SandboxLost
from agentkit.sandboxes import wire
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.backends.remote_http import Answer
from agentkit.sandboxes.backends.remote_link import Link
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.remote_protocol import (
    About,
    pack_json,
    pack_request,
    unpack,
    unpack_error,
    unpack_result,
)
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats, Stream
from agentkit.sandboxes.wire import Decoder, Frame, Kind

T = TypeVar("T")

_MARGIN = 1 << 16
"""Bytes of an answer beyond what was asked for."""
_FILES = 30.0
_LAST_WORDS = 2.0
_NO_WORDS = ("closed", "engine_down", "hung", "frozen")
"""Reasons of which the server knows no more than we do."""
_TREES = 600.0
"""Seconds that removing a directory may take."""


class RemoteChannel(Channel):
    """A connection to one generation of a sandbox on the server of ``link``."""

    def __init__(self, link: Link, id: str, key: str, isolation: str) -> None:
        self.isolation = isolation
        self.lost = asyncio.get_running_loop().create_future()
        self._link = link
        self._id = id
        self._key = key
        self._path = f"/v1/channels/{key}"
        link.channels[key] = self.lose

    async def exec(self, request: ExecRequest) -> ExecResult:
        async def work() -> ExecResult:
            limit = 2 * request.output_limit + _MARGIN
            content = pack_request(request)
            return unpack_result(
                await self._link.call("POST", f"{self._path}/exec", content, timeout=request.timeout, limit=limit)
            )

        try:
            return await self.guarded(work())
        except EngineUnavailable:
            if request.idempotency_key is None:
                raise
            return await self.guarded(work())

    async def spawn(self, request: ExecRequest) -> Process:
        async def work() -> Process:
            process = RemoteProcess(self, self._link, request)
            try:
                await process.start(f"{self._path}/spawn")
            except BaseException:
                await finished(process.stop())
                raise
            return process

        return await self.guarded(work())

    async def read(self, path: str, limit: int) -> bytes:
        return await self.guarded(self._read(path, limit))

    async def write(self, path: str, data: bytes, mode: int) -> None:
        await self._ask("write", path, mode, data)

    async def list(self, path: str) -> list[FileInfo]:
        return unpack(list[FileInfo], await self._ask("list", path, most=64 << 20))

    async def stat(self, path: str) -> FileInfo | None:
        answer = await self._ask("stat", path)
        return None if answer == b"null" else unpack(FileInfo, answer)

    async def remove(self, path: str) -> None:
        await self._ask("remove", path, timeout=_TREES)

    async def mkdir(self, path: str) -> None:
        await self._ask("mkdir", path)

    async def stats(self) -> Stats:
        return unpack(Stats, await self._ask("stats"))

    async def ping(self, timeout: float) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.wait_for(self._ask("ping", "", timeout), timeout)
        return loop.time() - start

    async def close(self) -> None:
        self._link.channels.pop(self._key, None)
        self.lose("closed")

    async def guarded(self, work: Awaitable[T]) -> T:
        """Do it if and while the channel lasts."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.lost.result() not in _NO_WORDS:
                # The server knows more of it, and is about to say so.
                await asyncio.wait({task}, timeout=_LAST_WORDS)
        finally:
            if not task.done():
                task.cancel()
                # What was started is killed before the caller goes on.
                await finished(asyncio.wait({task}))
        if self.lost.done() and (task.cancelled() or isinstance(task.exception(), EngineUnavailable)):
            raise self.loss()
        return task.result()

    def loss(self) -> SandboxLost:
        reason = self.lost.result()
        return SandboxLost(f"sandbox {self._id} on {self._link.url} is lost: {reason}", reason=reason)

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    async def _read(self, path: str, limit: int) -> bytes:
        content, pieces, size = _about(path, limit), [], 0
        async with self._link.exchange("POST", f"{self._path}/read", content, timeout=_FILES) as answer:
            async for frame in _frames(answer):
                if frame.kind == Kind.DONE:
                    return b"".join(pieces)
                if frame.kind == Kind.FAIL:
                    raise unpack_error(frame.payload)
                size += len(frame.payload)
                if frame.kind != Kind.OUTPUT or size > limit:
                    raise ProtocolError(f"{self._link.url} sent something other than what was asked for: read {path}")
                pieces.append(frame.payload)
        raise ProtocolError(f"{self._link.url} left out the end of {path}")

    async def _ask(
        self,
        verb: str,
        path: str = "",
        number: float = 0.0,
        data: bytes = b"",
        *,
        timeout: float = _FILES,
        most: int = _MARGIN,
    ) -> bytes:
        content = _about(path, number, data)
        return await self.guarded(self._link.call("POST", f"{self._path}/{verb}", content, timeout=timeout, limit=most))


class RemoteProcess(Process):
    """A command that runs on a server; a task reads its frames, at most ``output_limit`` bytes ahead of the reader."""

    def __init__(self, channel: RemoteChannel, link: Link, request: ExecRequest) -> None:
        self._channel = channel
        self._link = link
        self._request = request
        self._limit = max(request.output_limit, 1)
        self._path = ""
        self._chunks: deque[tuple[Stream, bytes]] = deque()
        self._waiting = 0
        self._moved = asyncio.Condition()
        self._end: ExecResult | Exception | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def start(self, path: str) -> None:
        """Return when it runs."""
        self._reader = asyncio.ensure_future(self._read(path))
        await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Leave, which kills it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while True:
            async with self._moved:
                await self._moved.wait_for(lambda: self._chunks or self._end is not None)
                if not self._chunks:
                    break
                chunk = self._chunks.popleft()
                self._waiting -= len(chunk[1])
                self._moved.notify_all()
            yield chunk
        if isinstance(self._end, Exception):
            raise self._end

    async def write(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), wire.CHUNK):
                await self._tell("input", data[start : start + wire.CHUNK])

    async def close_stdin(self) -> None:
        async with self._writing:
            await self._tell("end")

    async def kill(self, signal: int = 9) -> None:
        await self._tell("kill", number=signal)

    async def wait(self) -> ExecResult:
        kept = {"stdout": Capture(self._limit), "stderr": Capture(self._limit)}
        async for stream, data in self:
            kept[stream].feed(data)
        assert isinstance(self._end, ExecResult)
        head = {
            **vars(self._end),
            "stdout_bytes": kept["stdout"].value(),
            "stderr_bytes": kept["stderr"].value(),
            "truncated": self._end.truncated or kept["stdout"].truncated or kept["stderr"].truncated,
        }
        return ExecResult(**head)

    async def _tell(self, verb: str, content: bytes = b"", **params: Any) -> None:
        if isinstance(self._end, Exception):
            raise self._end
        await self._channel.guarded(
            self._link.call("POST", f"{self._path}/{verb}", content, timeout=self._request.timeout, **params)
        )

    async def _read(self, path: str) -> None:
        end: ExecResult | Exception = ProtocolError(f"{self._link.url} left out how a command ended")
        try:
            content = pack_request(self._request)
            async with self._link.exchange("POST", path, content, timeout=self._request.timeout) as answer:
                end = await self._read_frames(answer) or end
        except asyncio.CancelledError:
            end = self._channel.loss() if self._channel.lost.done() else SandboxLost("the call was cancelled")
            raise
        except EngineUnavailable as error:
            end = self._channel.loss() if self._channel.lost.done() else error
        except Exception as error:
            end = error
        finally:
            self._end = end
            if not self._started.done():
                self._started.set_exception(end if isinstance(end, Exception) else ProtocolError("it never began"))
                self._started.exception()
            await finished(self._notify())

    async def _read_frames(self, answer: Answer) -> ExecResult | Exception | None:
        async for frame in _frames(answer):
            if frame.kind == Kind.DONE:
                return unpack_result(frame.payload)
            if frame.kind == Kind.FAIL:
                return unpack_error(frame.payload)
            await self._take(frame)
        return None

    async def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.STARTED and not self._started.done():
            self._path = f"/v1/processes/{frame.payload.decode('ascii', 'replace')}"
            self._started.set_result(None)
            self._channel.lost.add_done_callback(self._on_lost)
        elif frame.kind in (Kind.OUTPUT, Kind.ERRORS):
            async with self._moved:
                self._chunks.append(("stdout" if frame.kind == Kind.OUTPUT else "stderr", frame.payload))
                self._waiting += len(frame.payload)
                self._moved.notify_all()
                await self._moved.wait_for(lambda: self._waiting < self._limit)
        else:
            raise ProtocolError(f"a frame of kind {frame.kind} came from {self._link.url} out of place")

    def _on_lost(self, lost: asyncio.Future[str]) -> None:
        if self._reader is not None and lost.result() != "closed":
            self._reader.cancel()

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()


def _about(path: str, number: float, data: bytes = b"") -> bytes:
    return wire.pack(pack_json(asdict(About(path, number))), data)


async def _frames(answer: Answer) -> AsyncIterator[Frame]:
    decoder = Decoder()
    async for data in answer:
        for frame in decoder.feed(data):
            yield frame
