"""The hot path to a pretended sandbox: commands, files and pings, with whatever faults were asked for.

Invariant: each call ends with a result, a typed error, or the loss of the connection, as the promises of ``Channel``
have it; only a sandbox that was frozen or muted on purpose leaves its callers waiting.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from agentkit.errors import CommandNotFound, DiskFull, FileTooLarge, PathError, SandboxLost
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.backends import fake_programs
from agentkit.sandboxes.backends.fake_box import Box
from agentkit.sandboxes.backends.fake_files import Node
from agentkit.sandboxes.backends.fake_machine import CannotFork, Into, Out, Pipe, Proc, captured
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats, Stream

T = TypeVar("T")


class FakeChannel(Channel):
    """A connection to one generation of a box."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.isolation = "fake"
        self.lost = asyncio.get_running_loop().create_future()
        box.channels.append(self)

    def lose(self, reason: str) -> None:
        """The connection ends."""
        if not self.lost.done():
            self.lost.set_result(reason)
        if self in self._box.channels:
            self._box.channels.remove(self)
            self._box.contact_ended()

    async def exec(self, request: ExecRequest) -> ExecResult:
        key = request.idempotency_key
        if key is None:
            return await self._call("exec", lambda: self._run(request))
        results = self._box.results
        if key not in results:
            results[key] = asyncio.ensure_future(self._call("exec", lambda: self._run(request)))
            # Whoever asked first may have left when it fails; the error is for those who still wait.
            results[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(results[key])

    async def spawn(self, request: ExecRequest) -> Process:
        async def start() -> Process:
            output = _Merged(request.output_limit)
            stdin = _pipe_of(request.stdin, stay_open=True)
            proc = self._start(request, output.end("stdout"), output.end("stderr"), stdin)
            return FakeProcess(self, proc, output, request)

        return await self._call("spawn", start)

    async def read(self, path: str, limit: int) -> bytes:
        async def work() -> bytes:
            node = self._box.machine.files.get(path)
            if node.kind != "file":
                raise PathError(f"{path} is a {node.kind}, not a regular file", path=path)
            if len(node.data) > limit:
                raise FileTooLarge(f"{path} has {len(node.data)} bytes, more than {limit}", path=path)
            return bytes(node.data)

        return await self._file_call("read", path, work)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        async def work() -> None:
            files = self._box.machine.files
            there = files.find(path)
            if there is not None and there.kind == "other":
                raise PathError(f"{path} is no regular file", path=path)
            files.mkdir(posixpath.dirname(path))
            files.write(path, data, mode)

        await self._file_call("write", path, work)

    async def list(self, path: str) -> list[FileInfo]:
        async def work() -> list[FileInfo]:
            files = self._box.machine.files
            paths = [posixpath.join(path, name) for name in files.names(path)]
            return [_info(entry, files.get(entry, follow=False)) for entry in paths]

        return await self._file_call("list", path, work)

    async def stat(self, path: str) -> FileInfo | None:
        async def work() -> FileInfo | None:
            node = self._box.machine.files.find(path, follow=False)
            return None if node is None else _info(path, node)

        return await self._file_call("stat", path, work)

    async def remove(self, path: str) -> None:
        async def work() -> None:
            if self._box.machine.files.find(path, follow=False) is not None:
                self._box.machine.files.remove(path)

        await self._file_call("remove", path, work)

    async def mkdir(self, path: str) -> None:
        async def work() -> None:
            self._box.machine.files.mkdir(path)

        await self._file_call("mkdir", path, work)

    async def stats(self) -> Stats:
        async def work() -> Stats:
            machine, spec = self._box.machine, self._box.spec
            return Stats(
                memory=machine.memory_used(),
                memory_limit=machine.memory,
                cpu_seconds=0.0,
                processes=len(machine.processes),
                oom_kills=machine.oom_kills,
                workspace_used=machine.files.used(spec.workdir),
                workspace_size=spec.resources.workspace,
            )

        return await self._call("stats", work)

    async def ping(self, timeout: float) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def work() -> None: ...

        await asyncio.wait_for(self._call("ping", work), timeout)
        return loop.time() - start

    async def close(self) -> None:
        self.lose("closed")

    async def _call(self, op: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do it if and while the connection lasts."""
        if self.lost.done():
            raise self._loss()
        self._box.note(op)

        async def arrive_and_work() -> T:
            await self._box.arrive(op)
            return await work()

        task = asyncio.ensure_future(arrive_and_work())
        try:
            await asyncio.wait({task, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # The command's processes are killed before the caller goes on.
                await asyncio.wait({task})
        if task.cancelled():
            raise self._loss()
        return task.result()

    async def _file_call(self, op: str, path: str, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._call(op, work)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise DiskFull(f"{path} does not fit: the disk is full", path=path) from None
            raise PathError(f"{op} {path}: {error.strerror}", path=path) from None

    def _loss(self) -> SandboxLost:
        reason = self.lost.result()
        return SandboxLost(
            f"sandbox {self._box.id} is lost: {reason}", reason=reason, exit_code=self._box.exit_code, log_tail=""
        )

    def _start(self, request: ExecRequest, out: Out, err: Out, stdin: Pipe) -> Proc:
        machine = self._box.machine
        directory = machine.files.find(request.cwd)
        if directory is None or directory.kind != "directory":
            raise CommandNotFound(f"the working directory {request.cwd} does not exist", cwd=request.cwd)
        try:
            program = fake_programs.find(machine, request.argv[0], request.cwd)
        except OSError as error:
            raise CommandNotFound(f"{request.argv[0]} cannot be run: {error.strerror}", argv=request.argv) from None
        env = {"PATH": "/usr/bin:/bin", "HOME": self._box.spec.workdir, **self._box.spec.env, **request.env}
        try:
            return machine.start(
                program, list(request.argv), parent=None, stdin=stdin, out=out, err=err, cwd=request.cwd, env=env
            )
        except CannotFork:
            raise CommandNotFound(
                f"no process can be started: all {machine.pids} are in use", argv=request.argv
            ) from None

    async def _run(self, request: ExecRequest) -> ExecResult:
        box = self._box
        box.executed.append(request)
        loop = asyncio.get_running_loop()
        start, kills = loop.time(), box.machine.oom_kills
        out, err = Capture(request.output_limit), Capture(request.output_limit)
        proc = self._start(request, captured(out), captured(err), _pipe_of(request.stdin))
        machine, timed_out, tainted = box.machine, False, False
        try:
            await box.disturb(proc)
            await asyncio.wait_for(proc.ended.wait(), max(request.timeout - (loop.time() - start), 0.0))
        except asyncio.TimeoutError:
            timed_out = True
            tainted = not await machine.kill_tree(proc)
        except asyncio.CancelledError:
            await machine.kill_tree(proc)
            raise
        return ExecResult(
            exit_code=None if timed_out else proc.status,
            stdout_bytes=out.value(),
            stderr_bytes=err.value(),
            duration=loop.time() - start,
            timed_out=timed_out,
            truncated=out.truncated or err.truncated,
            oom_killed=machine.oom_kills > kills,
            signal=proc.signal,
            tainted=tainted,
        )


class FakeProcess(Process):
    """A command that runs on."""

    def __init__(self, channel: FakeChannel, proc: Proc, output: _Merged, request: ExecRequest) -> None:
        self._channel = channel
        self._proc = proc
        self._stdin = proc.stdin
        self._output = output
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._finished: float | None = None
        self._timed_out = False
        self._tainted = False
        self._kills = proc.machine.oom_kills
        self._watch = asyncio.ensure_future(self._watch_over())
        channel.lost.add_done_callback(lambda _: output.finish())

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while (item := await self._output.read()) is not None:
            yield item
        self._check()

    async def write(self, data: bytes) -> None:
        self._check()
        if self._stdin is None or self._proc.status is not None or self._stdin.broken:
            raise BrokenPipeError("the command reads no more")
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        if self._stdin is not None:
            self._stdin.close()

    async def kill(self, signal: int = 9) -> None:
        for proc in list(self._proc.machine.processes.values()):
            if proc.group == self._proc.group:
                proc.send(signal)

    async def wait(self) -> ExecResult:
        captures = {"stdout": Capture(self._request.output_limit), "stderr": Capture(self._request.output_limit)}
        while (item := await self._output.read()) is not None:
            captures[item[0]].feed(item[1])
        await asyncio.wait({self._watch, self._channel.lost}, return_when=asyncio.FIRST_COMPLETED)
        self._check()
        assert self._finished is not None
        return ExecResult(
            exit_code=None if self._timed_out else self._proc.status,
            stdout_bytes=captures["stdout"].value(),
            stderr_bytes=captures["stderr"].value(),
            duration=self._finished - self._started,
            timed_out=self._timed_out,
            truncated=any(capture.truncated for capture in captures.values()),
            oom_killed=self._proc.machine.oom_kills > self._kills,
            signal=self._proc.signal,
            tainted=self._tainted,
        )

    async def _watch_over(self) -> None:
        try:
            await asyncio.wait_for(self._proc.ended.wait(), self._request.timeout)
        except asyncio.TimeoutError:
            self._timed_out = True
            self._tainted = not await self._proc.machine.kill_tree(self._proc)
        self._finished = self._loop.time()
        self._output.finish()

    def _check(self) -> None:
        if self._channel.lost.done():
            raise self._channel._loss()


class _Merged:
    """Two streams in the order in which they were written, at most ``limit`` bytes waiting."""

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 1)
        self._items: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self._finished = False
        self._changed = asyncio.Event()

    def end(self, stream: Stream) -> Out:
        return _End(self, stream)

    def finish(self) -> None:
        """Nothing more is to come; who still writes must not wait for a reader."""
        self._finished = True
        self._changed.set()

    async def put(self, stream: Stream, data: bytes) -> None:
        while self._size >= self._limit and not self._finished:
            await self._change()
        if not self._finished:
            self._items.append((stream, data))
            self._size += len(data)
            self._changed.set()

    async def read(self) -> tuple[Stream, bytes] | None:
        while not self._items:
            if self._finished:
                return None
            await self._change()
        item = self._items.popleft()
        self._size -= len(item[1])
        self._changed.set()
        return item

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _End(Into):
    def __init__(self, output: _Merged, stream: Stream) -> None:
        super().__init__(lambda data: None)
        self._output = output
        self._stream: Stream = stream

    async def write(self, data: bytes) -> None:
        await self._output.put(self._stream, data)


def _pipe_of(data: bytes, stay_open: bool = False) -> Pipe:
    pipe = Pipe()
    pipe.open()
    pipe.unread(data)
    if not stay_open:
        pipe.close()
    return pipe


def _info(path: str, node: Node) -> FileInfo:
    return FileInfo(path, node.kind, len(node.data), node.mode, node.modified)
