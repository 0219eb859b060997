"""One sandbox of ``FakeBackend``: its files, its commands, and the connections to it."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from agentkit.errors import CommandNotFound, DiskFull, FileTooLarge, PathError, SandboxLost
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.output import Capture
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.testing.faults import Rules
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Observed, Stats, Stream

T = TypeVar("T")
Script = Callable[..., Awaitable[int | None]]
"""The coroutine of a command: gets the ``Command`` and the words of its line, returns the exit code (None is 0)."""


@dataclass
class FakeFile:
    """An entry of the file system. Directories exist if they are entries, mounts, or parents of entries."""

    data: bytes = b""
    kind: Literal["file", "directory", "symlink", "other"] = "file"
    mode: int = 0o644
    modified: float = 0.0


class Command:
    """A running command, as its coroutine sees it."""

    def __init__(self, box: FakeSandbox, request: ExecRequest, script: Script, words: Iterable[str]) -> None:
        """Start it. Raises ``BlockingIOError`` if the sandbox has reached its limit of processes."""
        self.box = box
        self.request = request
        self.env = {**box.spec.env, **request.env}
        self.input: asyncio.Queue[bytes] = asyncio.Queue()
        if request.stdin:
            self.input.put_nowait(request.stdin)
        self.output: asyncio.Queue[tuple[Stream, bytes] | None] = asyncio.Queue()
        """What was written; None at its end."""
        self.signal: int | None = None
        self._tree: list[asyncio.Future[int | None]] = []
        self.main = self.start(script, *words)
        self._ended = asyncio.ensure_future(self._end())

    def start(self, script: Script, *words: str) -> asyncio.Future[int | None]:
        """Start a child process. It is killed with the command, and otherwise runs on after its end.

        Raises ``BlockingIOError`` if the sandbox has reached its limit of processes.
        """
        if len(self.box.processes) >= self.box.process_limit:
            raise BlockingIOError(f"all {self.box.process_limit} processes are in use")
        task = asyncio.ensure_future(script(self, *words))
        self._tree.append(task)
        self.box.processes.add(task)
        task.add_done_callback(self.box.processes.discard)
        return task

    async def sleep(self, seconds: float = 0.0) -> None:
        """Let time pass; longer while the sandbox is paused."""
        await asyncio.sleep(seconds)
        await self.box.thawed.wait()

    async def write(self, data: bytes | str, stream: Stream = "stdout") -> None:
        """Write output."""
        await self.sleep()
        self.output.put_nowait((stream, data.encode() if isinstance(data, str) else data))

    async def read(self) -> bytes:
        """Return the next bytes of standard input; none at its end."""
        await self.sleep()
        return await self.input.get()

    async def stop(self, signal: int = 9) -> bool:
        """Kill the process tree and wait for its end; return False if it cannot be killed."""
        alive = [task for task in self._tree if not task.done()]
        if self.box.unkillable and alive:
            return False
        self.signal = self.signal or signal
        for task in alive:
            task.cancel()
        await asyncio.wait(self._tree)
        return True

    async def next_output(self) -> tuple[Stream, bytes] | None:
        """Return the next piece of output; None at its end."""
        item = await self.output.get()
        if item is None:
            self.output.put_nowait(None)
        return item

    async def result(self) -> ExecResult:
        """Return the result, with the output that was not read. Raises what the script raises."""
        captures = {"stdout": Capture(self.request.output_limit), "stderr": Capture(self.request.output_limit)}
        while (item := await self.next_output()) is not None:
            captures[item[0]].feed(item[1])
        duration, timed_out, tainted = await self._ended
        code, signal, oom = None, None, False
        if self.main.done():
            oom = not self.main.cancelled() and isinstance(self.main.exception(), MemoryError)
            signal = self.signal or 9 if self.main.cancelled() or oom else None
            code = self.main.result() or 0 if signal is None else 128 + signal
        return ExecResult(
            exit_code=None if timed_out else code,
            stdout_bytes=captures["stdout"].value(),
            stderr_bytes=captures["stderr"].value(),
            duration=duration,
            timed_out=timed_out,
            truncated=any(capture.truncated for capture in captures.values()),
            oom_killed=oom,
            signal=signal,
            tainted=tainted,
        )

    async def _end(self) -> tuple[float, bool, bool]:
        """Wait for the end or the timeout; return the duration, whether it timed out, and whether it taints."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.wait({self.main}, timeout=self.request.timeout)
        timed_out = not self.main.done()
        tainted = timed_out and not await self.stop()
        self.output.put_nowait(None)
        return loop.time() - start, timed_out, tainted


async def _true(command: Command, *words: str) -> None:
    await command.sleep()


async def _echo(command: Command, *words: str) -> None:
    await command.write(" ".join(words) + "\n")


async def _sleep(command: Command, seconds: str) -> None:
    await command.sleep(float(seconds))


async def _hang(command: Command, *words: str) -> None:
    await asyncio.Event().wait()


COMMANDS: Mapping[str, Script] = {":": _true, "true": _true, "echo": _echo, "sleep": _sleep}
"""The commands that every ``FakeBackend`` knows."""


class Engine(Protocol):
    """The part of ``FakeBackend`` that its sandboxes use."""

    commands: Mapping[str, Script]
    rules: Rules
    call_seconds: float

    def note(self, op: str, id: str) -> None: ...

    def end(self, box: FakeSandbox, exit_code: int, oom: bool) -> None: ...


class FakeSandbox:
    """One sandbox of a ``FakeBackend``."""

    def __init__(self, engine: Engine, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> None:
        self.engine = engine
        self.id = id
        self.spec = spec
        self.labels = dict(labels)
        self.created = asyncio.get_running_loop().time()
        self.exit_code: int | None = None
        self.oom_killed = self.unkillable = False
        self.latency = 0.0
        self.channels: list[FakeChannel] = []
        self.processes: set[asyncio.Future[Any]] = set()
        self.process_limit = spec.resources.pids
        self.executed: list[ExecRequest] = []
        """Requests whose command was started."""
        self.results: dict[str, asyncio.Task[ExecResult]] = {}
        """Results by idempotency key."""
        self.thawed, self.heard = asyncio.Event(), asyncio.Event()
        self.thawed.set()
        self.heard.set()
        self.mounts = {
            spec.workdir: spec.resources.workspace, "/tmp": spec.resources.tmp, "/dev/shm": spec.resources.shm,
        }  # fmt: skip
        self.files = {"/dev/zero": FakeFile(kind="other"), "/dev/null": FakeFile(kind="other")}

    @property
    def paused(self) -> bool:
        return not self.thawed.is_set()

    @property
    def observed(self) -> Observed:
        state = "exited" if self.exit_code is not None else "paused" if self.paused else "running"
        return Observed(self.id, state, self.labels, self.exit_code, self.oom_killed, self.created)

    def mount(self, path: str) -> str | None:
        """Return the writable directory that contains ``path``."""
        return next((mount for mount in self.mounts if f"{path}/".startswith(f"{mount}/")), None)

    def used(self, mount: str) -> int:
        """Return the bytes of all files in a writable directory."""
        return sum(len(file.data) for path, file in self.files.items() if self.mount(path) == mount)

    def find(self, path: str) -> FakeFile | None:
        if path in self.files:
            return self.files[path]
        is_parent = any(f"{one}/".startswith(f"{path}/") for one in (*self.mounts, *self.files))
        return FakeFile(kind="directory", mode=0o755) if is_parent else None

    async def arrive(self, op: str) -> bool:
        """Wait until the agent serves a call; return whether its command hangs."""
        self.engine.note(op, self.id)
        await asyncio.sleep(self.engine.call_seconds + self.latency)
        hangs = False
        for fault in self.engine.rules.draw(op, self.id):
            if fault.does == "slow":
                await asyncio.sleep(fault.seconds)
            elif fault.does == "hang" and op == "exec":
                hangs = True
            elif fault.does == "hang":
                await asyncio.Event().wait()
            elif fault.does == "fail":
                self.cut("agent_dead")
            elif fault.does in ("die", "oom"):
                asyncio.get_running_loop().call_later(fault.seconds, self.engine.end, self, 137, fault.does == "oom")
            elif fault.does == "taint":
                self.unkillable = True
        await self.heard.wait()
        await self.thawed.wait()
        return hangs

    def command(self, request: ExecRequest, hang: bool = False) -> Command:
        """Start a command. Raises ``CommandNotFound``."""
        shell = request.argv[:2] == ("/bin/sh", "-c")
        line = request.argv[2] if shell else " ".join(request.argv)
        name, *words = line.split() or [""] if shell else request.argv
        known = self.engine.commands
        if line not in known and name not in known:
            raise CommandNotFound(f"no command {line!r} is scripted; add it to FakeBackend(commands=...)")
        script, words = (known[line], []) if line in known else (known[name], words)
        self.executed.append(request)
        try:
            return Command(self, request, _hang if hang else script, words)
        except BlockingIOError as error:
            raise CommandNotFound(f"{name} cannot be started: {error}", argv=request.argv) from None

    def cut(self, reason: str) -> None:
        """End all connections."""
        for channel in list(self.channels):
            channel.lose(reason)


class FakeChannel(Channel):
    """A connection to a ``FakeSandbox``."""

    isolation = "fake"

    def __init__(self, box: FakeSandbox) -> None:
        self._box = box
        self.lost = asyncio.get_running_loop().create_future()
        box.channels.append(self)

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if self in self._box.channels:
            self._box.channels.remove(self)

    async def exec(self, request: ExecRequest) -> ExecResult:
        key, results = request.idempotency_key, self._box.results
        if key is None:
            return await self.connected(self._run(request))
        if key not in results:
            results[key] = asyncio.ensure_future(self.connected(self._run(request)))
            # Retrieve the error: the first caller may have left.
            results[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(results[key])

    async def _run(self, request: ExecRequest) -> ExecResult:
        command = self._box.command(request, hang=await self._box.arrive("exec"))
        command.input.put_nowait(b"")
        try:
            return await command.result()
        except asyncio.CancelledError:
            await command.stop()
            raise

    async def spawn(self, request: ExecRequest) -> Process:
        return FakeProcess(self, await self._call("spawn", lambda: self._box.command(request)))

    async def read(self, path: str, limit: int) -> bytes:
        def read() -> bytes:
            file = self._box.find(path)
            if file is None or file.kind != "file":
                raise PathError(f"{path} is not a regular file", path=path)
            if len(file.data) > limit:
                raise FileTooLarge(f"{path} has {len(file.data)} bytes, more than {limit}", path=path)
            return file.data

        return await self._call("read", read)

    async def write(self, path: str, data: bytes, mode: int) -> None:
        def write() -> None:
            mount, there = self._box.mount(path), self._box.find(path)
            if (there and there.kind != "file") or (mount is None and self._box.spec.readonly_root):
                raise PathError(f"{path} cannot be written", path=path)
            used = self._box.used(mount) - len(there.data if there else b"") if mount else 0
            if mount and used + len(data) > self._box.mounts[mount]:
                raise DiskFull(f"{path} does not fit: {mount} is full", path=path)
            self._box.files[path] = FakeFile(data, mode=mode, modified=asyncio.get_running_loop().time())

        await self._call("write", write)

    async def list(self, path: str) -> list[FileInfo]:
        def list_directory() -> list[FileInfo]:
            directory = self._box.find(path)
            if directory is None or directory.kind != "directory":
                raise PathError(f"{path} is not a directory", path=path)
            below = [entry[len(path) :].strip("/") for entry in self._box.files if entry.startswith(f"{path}/")]
            names = sorted({entry.split("/")[0] for entry in below})
            return [info for name in names if (info := self._info(posixpath.join(path, name)))]

        return await self._call("list", list_directory)

    async def stat(self, path: str) -> FileInfo | None:
        return await self._call("stat", lambda: self._info(path))

    async def remove(self, path: str) -> None:
        def remove() -> None:
            for entry in [entry for entry in self._box.files if f"{entry}/".startswith(f"{path}/")]:
                del self._box.files[entry]

        await self._call("remove", remove)

    async def mkdir(self, path: str) -> None:
        def mkdir() -> None:
            there = self._box.find(path)
            if there and there.kind != "directory":
                raise PathError(f"{path} is not a directory", path=path)
            self._box.files[path] = FakeFile(kind="directory", mode=0o755)

        await self._call("mkdir", mkdir)

    async def stats(self) -> Stats:
        box, resources = self._box, self._box.spec.resources
        return await self._call(
            "stats",
            lambda: Stats(
                0, resources.memory, 0.0, len(box.processes), None, box.used(box.spec.workdir), resources.workspace
            ),
        )

    async def ping(self, timeout: float) -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.wait_for(self._call("ping", lambda: None), timeout)
        return loop.time() - start

    async def close(self) -> None:
        self.lose("closed")

    async def connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do ``work`` while the connection lasts. Raises ``SandboxLost``."""
        if self.lost.done():
            work.close()
            raise self.loss()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # The processes of the command are killed before the caller continues.
                await asyncio.wait({task})
        if task.cancelled():
            raise self.loss()
        return task.result()

    def loss(self) -> SandboxLost:
        reason = self.lost.result()
        return SandboxLost(
            f"sandbox {self._box.id} is lost: {reason}", reason=reason, exit_code=self._box.exit_code, log_tail=""
        )

    async def _call(self, op: str, work: Callable[[], T]) -> T:
        async def arrive_and_work() -> T:
            await self._box.arrive(op)
            return work()

        return await self.connected(arrive_and_work())

    def _info(self, path: str) -> FileInfo | None:
        file = self._box.find(path)
        return file and FileInfo(path, file.kind, len(file.data), file.mode, file.modified)


class FakeProcess(Process):
    """The handle of a spawned ``Command``."""

    def __init__(self, channel: FakeChannel, command: Command) -> None:
        self._channel = channel
        self._command = command

    async def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        while (item := await self._channel.connected(self._command.next_output())) is not None:
            yield item

    async def write(self, data: bytes) -> None:
        if self._channel.lost.done():
            raise self._channel.loss()
        if self._command.main.done():
            raise BrokenPipeError("the command has ended")
        self._command.input.put_nowait(data)

    async def close_stdin(self) -> None:
        self._command.input.put_nowait(b"")

    async def kill(self, signal: int = 9) -> None:
        await self._command.stop(signal)

    async def wait(self) -> ExecResult:
        return await self._channel.connected(self._command.result())
