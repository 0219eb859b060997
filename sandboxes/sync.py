"""The same sandboxes for callers that do not await: scripts, notebooks, actors, other people's trainers.

Invariant: every public name of ``Sandbox``, its files, shells and processes is here with the same parameters and the
same meaning; a call returns when it is done. Nothing is decided here: all of it happens in the background loop.

    with SyncSandbox.create() as box:
        print(box.exec("echo hi").stdout)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from agentkit.sandboxes.backend import Backend, Process
from agentkit.sandboxes.background import run
from agentkit.sandboxes.files import COPY_LIMIT, READ_LIMIT, Files
from agentkit.sandboxes.sandbox import DEFAULT_BACKEND, Sandbox
from agentkit.sandboxes.shell import Shell, ShellResult
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import (
    ExecResult,
    FileInfo,
    Observed,
    SandboxInfo,
    Snapshot,
    State,
    Stats,
    Stream,
    Transition,
)

T = TypeVar("T")


class SyncProcess:
    """See ``Process``: read its output by ``for stream, data in process``."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __iter__(self) -> Iterator[tuple[Stream, bytes]]:
        return _iterate(lambda: aiter(self._process))

    def write(self, data: bytes) -> None:
        run(self._process.write(data))

    def close_stdin(self) -> None:
        run(self._process.close_stdin())

    def kill(self, signal: int = 9) -> None:
        run(self._process.kill(signal))

    def wait(self) -> ExecResult:
        return run(self._process.wait())


class SyncShell:
    """See ``Shell``."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def run(
        self, cmd: str, *, timeout: float | None = None, output_limit: int | None = None, check: bool = False
    ) -> ShellResult:
        return run(self._shell.run(cmd, timeout=timeout, output_limit=output_limit, check=check))

    def close(self) -> None:
        run(self._shell.close())

    def __enter__(self) -> SyncShell:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class SyncFiles:
    """See ``Files``."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def read(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        return run(self._files.read(path, limit=limit))

    def read_text(self, path: str, *, limit: int = READ_LIMIT) -> str:
        return run(self._files.read_text(path, limit=limit))

    def write(self, path: str, data: str | bytes, *, mode: int = 0o644) -> None:
        run(self._files.write(path, data, mode=mode))

    def list(self, path: str = ".") -> Sequence[FileInfo]:
        return run(self._files.list(path))

    def stat(self, path: str) -> FileInfo | None:
        return run(self._files.stat(path))

    def exists(self, path: str) -> bool:
        return run(self._files.exists(path))

    def remove(self, path: str) -> None:
        run(self._files.remove(path))

    def mkdir(self, path: str) -> None:
        run(self._files.mkdir(path))

    def upload(self, source: str | os.PathLike[str], path: str) -> None:
        run(self._files.upload(source, path))

    def download(self, path: str, target: str | os.PathLike[str], *, limit: int = COPY_LIMIT) -> Sequence[str]:
        return run(self._files.download(path, target, limit=limit))


class SyncSandbox:
    """See ``Sandbox``. Made by ``create`` and ``connect``."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self.files = SyncFiles(box.files)

    @classmethod
    def create(
        cls,
        spec: SandboxSpec | str | None = None,
        *,
        backend: str | Backend = DEFAULT_BACKEND,
        snapshot: Snapshot | None = None,
        **fields: Any,
    ) -> SyncSandbox:
        return cls(run(Sandbox.create(spec, backend=backend, snapshot=snapshot, **fields)))

    @classmethod
    def connect(cls, id: str, *, backend: str | Backend = DEFAULT_BACKEND) -> SyncSandbox:
        return cls(run(Sandbox.connect(id, backend=backend)))

    @classmethod
    def list(
        cls, *, labels: Mapping[str, str] | None = None, backend: str | Backend = DEFAULT_BACKEND
    ) -> list[Observed]:
        return run(Sandbox.list(labels=labels, backend=backend))

    @classmethod
    def discard(cls, snapshot: Snapshot, *, backend: str | Backend | None = None) -> None:
        run(Sandbox.discard(snapshot, backend=backend))

    def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output_limit: int | None = None,
        check: bool = False,
        idempotency_key: str | None = None,
    ) -> ExecResult:
        return run(
            self._box.exec(
                cmd,
                timeout=timeout,
                cwd=cwd,
                env=env,
                stdin=stdin,
                output_limit=output_limit,
                check=check,
                idempotency_key=idempotency_key,
            )
        )

    def spawn(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output_limit: int | None = None,
    ) -> SyncProcess:
        return SyncProcess(
            run(self._box.spawn(cmd, timeout=timeout, cwd=cwd, env=env, stdin=stdin, output_limit=output_limit))
        )

    def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> SyncShell:
        return SyncShell(run(self._box.shell(cwd=cwd, env=env)))

    def ping(self, timeout: float = 2.0) -> float:
        return run(self._box.ping(timeout))

    def pause(self) -> None:
        run(self._box.pause())

    def resume(self) -> None:
        run(self._box.resume())

    def snapshot(self, name: str | None = None) -> Snapshot:
        return run(self._box.snapshot(name))

    def fork(self) -> SyncSandbox:
        return type(self)(run(self._box.fork()))

    def restart(self) -> None:
        run(self._box.restart())

    def reset(self) -> None:
        run(self._box.reset())

    def extend(self, ttl: float | None) -> None:
        run(self._box.extend(ttl))

    def close(self, *, remove: bool | None = None) -> None:
        run(self._box.close(remove=remove))

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        run(self._box.__aexit__(kind, error, traceback))

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def spec(self) -> SandboxSpec:
        return self._box.spec

    @property
    def backend(self) -> Backend:
        return self._box.backend

    @property
    def state(self) -> State:
        return self._box.state

    @property
    def generation(self) -> int:
        return self._box.generation

    @property
    def history(self) -> Sequence[Transition]:
        return _seen(lambda: self._box.history)

    @property
    def loss(self) -> str | None:
        return self._box.loss

    @property
    def info(self) -> SandboxInfo:
        return _seen(lambda: self._box.info)

    def stats(self) -> Stats:
        return run(self._box.stats())

    def logs(self, tail: int = 100) -> str:
        return run(self._box.logs(tail))

    def events(self) -> Iterator[Transition]:
        return _iterate(self._box.events)

    def __repr__(self) -> str:
        return f"<Sync{repr(self._box).lstrip('<')}"


def _seen(look: Callable[[], T]) -> T:
    """Looked at in the loop, where nothing changes meanwhile."""

    async def work() -> T:
        return look()

    return run(work())


def _iterate(begin: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    """What an asynchronous iterator brings, from its beginning, which is now."""

    async def first() -> AsyncIterator[T]:
        return begin()

    async def following(source: AsyncIterator[T]) -> tuple[T] | None:
        try:
            return (await anext(source),)
        except StopAsyncIteration:
            return None

    async def end(source: Any) -> None:
        if hasattr(source, "aclose"):
            await source.aclose()

    source = run(first())

    def items() -> Iterator[T]:
        try:
            while (item := run(following(source))) is not None:
                yield item[0]
        finally:
            run(end(source))

    return items()
