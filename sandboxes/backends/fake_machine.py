"""A computer made of coroutines: processes with pids, groups, signals and pipes, and the memory that they share.

Invariant: a process ends by its program's return, by an error of the program, or by a signal, and each way is told as
Linux would tell it; a process that has ended holds nothing. Nothing here waits for anything but ``asyncio``, so that it
runs in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal as signals
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from agentkit.sandboxes.backends.fake_files import FakeFiles
from agentkit.sandboxes.capture import Capture

PIPE_SIZE = 1 << 20
"""Bytes; more than a real one's, so that floods take fewer turns of the loop."""
Program = Callable[["Proc", list[str]], Awaitable[int]]


class OutOfMemory(Exception):
    """The machine's memory limit was met; the process that asked for more is killed."""


class CannotFork(Exception):
    """The machine's limit of processes is reached."""


class Out(Protocol):
    """Where a process writes to."""

    async def write(self, data: bytes) -> None: ...

    def open(self) -> None:
        """One more process writes here."""
        ...

    def close(self) -> None:
        """One less."""
        ...


class Into:
    """Output that needs no reader: a capture, a file or nothing."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    async def write(self, data: bytes) -> None:
        self._take(data)

    def open(self) -> None: ...

    def close(self) -> None: ...


def captured(capture: Capture) -> Into:
    return Into(capture.feed)


class Pipe:
    """Bytes from writers to one reader, at most ``size`` of them waiting."""

    def __init__(self, size: int = PIPE_SIZE) -> None:
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._size = max(size, 1)
        self._writers = 0
        self._changed = asyncio.Event()
        self.broken = False

    async def write(self, data: bytes) -> None:
        """Raises ``BrokenPipeError`` once the reader is gone."""
        while data:
            while self._waiting >= self._size and not self.broken:
                await self._change()
            if self.broken:
                raise BrokenPipeError
            taken, data = data[: self._size], data[self._size :]
            self._chunks.append(taken)
            self._waiting += len(taken)
            self._changed.set()

    async def read(self) -> bytes:
        """Some bytes, or none when all writers have gone."""
        while not self._chunks:
            if not self._writers:
                return b""
            await self._change()
        data = self._chunks.popleft()
        self._waiting -= len(data)
        self._changed.set()
        return data

    def unread(self, data: bytes) -> None:
        if data:
            self._chunks.appendleft(data)
            self._waiting += len(data)

    def open(self) -> None:
        self._writers += 1

    def close(self) -> None:
        self._writers -= 1
        self._changed.set()

    def leave(self) -> None:
        """The reader goes; writers meet a broken pipe."""
        self.broken = True
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Proc:
    """One process. Made by ``Machine.start``."""

    def __init__(
        self,
        machine: Machine,
        pid: int,
        parent: Proc | None,
        group: int,
        stdin: Pipe | None,
        out: Out,
        err: Out,
        cwd: str,
        env: Mapping[str, str],
    ) -> None:
        self.machine = machine
        self.pid = pid
        self.parent = parent
        self.group = group
        self.stdin = stdin
        self.out = out
        self.err = err
        self.cwd = cwd
        self.env = dict(env)
        self.ignored: set[int] = set(parent.ignored) if parent else set()
        self.on_signal: Callable[[int], bool] | None = None
        """Asked first; True if the signal is dealt with."""
        self.signal: int | None = None
        self.status: int | None = None
        self.memory = 0
        self.task: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()

    @property
    def commands(self) -> set[Proc]:
        """The processes that this one stands under, itself included."""
        return {self} | (self.parent.commands if self.parent else set())

    def send(self, signal: int) -> None:
        """A signal arrives."""
        if self.status is not None or (self.machine.unkillable and signal == signals.SIGKILL):
            return
        if signal != signals.SIGKILL and (signal in self.ignored or (self.on_signal and self.on_signal(signal))):
            return
        if self.signal is None:
            self.signal = signal
        assert self.task is not None
        self.task.cancel()

    def grow(self, size: int) -> None:
        """Take or (negative) give back memory. Raises ``OutOfMemory``."""
        self.memory += size
        if size > 0 and self.machine.memory_used() > self.machine.memory:
            raise OutOfMemory


class Machine:
    """Processes and files of one sandbox. ``memory`` and ``pids`` are its limits; ``user`` is the number it runs as."""

    def __init__(self, files: FakeFiles, memory: int, pids: int, programs: Mapping[str, Program], user: str) -> None:
        self.files = files
        self.user = user
        self.memory = memory
        self.pids = pids
        self.programs = programs
        self.processes: dict[int, Proc] = {}
        self.oom_kills = 0
        self.unkillable = False
        self._numbers = itertools.count(100)
        self._thaw = asyncio.Event()
        self._thaw.set()

    def memory_used(self) -> int:
        return sum(proc.memory for proc in self.processes.values()) + sum(map(self.files.used, self.files.mounts))

    def freeze(self) -> None:
        self._thaw.clear()

    def thaw(self) -> None:
        self._thaw.set()

    async def breathe(self, seconds: float = 0.0) -> None:
        """Let time pass for a process; in a frozen machine, until it goes on."""
        await asyncio.sleep(seconds)
        await self._thaw.wait()

    def start(
        self,
        program: Program,
        argv: list[str],
        *,
        parent: Proc | None,
        stdin: Pipe | None,
        out: Out,
        err: Out,
        cwd: str,
        env: Mapping[str, str],
    ) -> Proc:
        """Start a process; without ``parent`` it leads a group of its own. Raises ``CannotFork``."""
        if len(self.processes) >= self.pids:
            raise CannotFork
        pid = next(self._numbers)
        proc = Proc(self, pid, parent, parent.group if parent else pid, stdin, out, err, cwd, env)
        out.open()
        err.open()
        self.processes[pid] = proc
        proc.task = asyncio.ensure_future(self._live(proc, program, argv))
        # A task that is cancelled before its first step never runs: the process must end all the same.
        proc.task.add_done_callback(lambda _: self._bury(proc))
        return proc

    async def _live(self, proc: Proc, program: Program, argv: list[str]) -> None:
        try:
            proc.status = await program(proc, argv)
        except asyncio.CancelledError:
            pass
        except BrokenPipeError:
            proc.signal = signals.SIGPIPE
        except OutOfMemory:
            self.oom_kills += 1
            proc.signal = signals.SIGKILL
        except CannotFork:
            await _say(proc, "Cannot fork")
            proc.status = 2
        except OSError as error:
            await _say(proc, f"{error.filename}: {error.strerror}")
            proc.status = 1

    def _bury(self, proc: Proc) -> None:
        if self.processes.pop(proc.pid, None) is None:
            return
        if proc.status is None:
            proc.signal = proc.signal or int(signals.SIGKILL)
            proc.status = 128 + proc.signal
        proc.out.close()
        proc.err.close()
        if proc.stdin is not None and (proc.parent is None or proc.parent.stdin is not proc.stdin):
            proc.stdin.leave()
        proc.memory = 0
        proc.ended.set()

    def tree(self, proc: Proc) -> list[Proc]:
        """A process and all that came from it, those included that left its group."""
        return [other for other in list(self.processes.values()) if proc in other.commands]

    async def kill_tree(self, proc: Proc) -> bool:
        """Kill a process and all that came from it; False if some of them live on."""
        victims = self.tree(proc)
        for victim in victims:
            victim.send(signals.SIGKILL)
        if self.unkillable:
            return not victims
        for victim in victims:
            await victim.ended.wait()
        return True

    async def kill_all(self) -> None:
        """Power off: nothing survives."""
        self.unkillable = False
        tasks = [proc.task for proc in list(self.processes.values()) if proc.task is not None]
        for proc in list(self.processes.values()):
            proc.send(signals.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _say(proc: Proc, text: str) -> None:
    with contextlib.suppress(BrokenPipeError, asyncio.CancelledError):
        await proc.err.write(f"{text}\n".encode())


def never_read() -> Any:
    """Output that is thrown away."""
    return Into(lambda data: None)
