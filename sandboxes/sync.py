"""Blocking sandboxes, for scripts, notebooks and trainers without an event loop.

with SyncSandbox.create() as box:
    print(box.exec("echo hi").stdout)
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from agentkit.portal import portal
from agentkit.sandboxes.backend import Backend, Process
from agentkit.sandboxes.files import Files
from agentkit.sandboxes.sandbox import DEFAULT_BACKEND, Sandbox
from agentkit.sandboxes.shell import Shell
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Observed, SandboxInfo, Snapshot, State, Stream, Transition

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


class _Blocking(Generic[W]):
    """A wrapper around an asynchronous object, which runs in the portal's loop."""

    def __init__(self, wrapped: W) -> None:
        self._wrapped = wrapped
        self._portal = portal()

    @property
    def _inherited(self) -> bool:
        """Whether this process was forked from the one that opened the object."""
        return portal() is not self._portal

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._inherited:
            work.close()
            raise RuntimeError(
                "this sandbox was opened before the process was forked, and belongs to the parent; "
                "create or connect to a sandbox in the child"
            )
        return self._portal.run(work)

    def _look(self, read: Callable[[], T]) -> T:
        """Read in the portal's loop, where nothing changes meanwhile."""

        async def work() -> T:
            return read()

        return self._run(work())

    def _iterate(self, start: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Iterate over an asynchronous iterator, which starts now."""
        source = self._look(start)

        async def following() -> tuple[T] | None:
            try:
                return (await anext(source),)
            except StopAsyncIteration:
                return None

        async def end() -> None:
            if isinstance(source, AsyncGenerator):
                await source.aclose()

        def items() -> Iterator[T]:
            try:
                while (item := self._run(following())) is not None:
                    yield item[0]
            finally:
                self._run(end())

        return items()


def _blocking(
    method: Callable[Concatenate[W, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking[W], P], T]:
    """Return a method with the same parameters that waits for the result."""

    @functools.wraps(method)
    def call(self: _Blocking[W], *args: P.args, **kwargs: P.kwargs) -> T:
        # By name: the wrapped object's class may override the method.
        return self._run(getattr(self._wrapped, method.__name__)(*args, **kwargs))

    return call


def _blocking_as(
    wrapper: Callable[[T], R], method: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[_Blocking[W], P], R]:
    """Return ``method`` without ``await``, with its result in the synchronous ``wrapper``."""
    blocking = _blocking(method)

    @functools.wraps(method)
    def call(self: _Blocking[W], *args: P.args, **kwargs: P.kwargs) -> R:
        return wrapper(blocking(self, *args, **kwargs))

    return call


class SyncProcess(_Blocking[Process]):
    """A blocking ``Process``: read its output with ``for stream, data in process``."""

    def __iter__(self) -> Iterator[tuple[Stream, bytes]]:
        return self._iterate(lambda: aiter(self._wrapped))

    write = _blocking(Process.write)
    close_stdin = _blocking(Process.close_stdin)
    kill = _blocking(Process.kill)
    wait = _blocking(Process.wait)


class SyncShell(_Blocking[Shell]):
    """A blocking ``Shell``."""

    run = _blocking(Shell.run)
    close = _blocking(Shell.close)

    def __enter__(self) -> SyncShell:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._inherited:
            self.close()


class SyncFiles(_Blocking[Files]):
    """Blocking ``Files``."""

    read = _blocking(Files.read)
    read_text = _blocking(Files.read_text)
    write = _blocking(Files.write)
    list = _blocking(Files.list)
    stat = _blocking(Files.stat)
    exists = _blocking(Files.exists)
    remove = _blocking(Files.remove)
    mkdir = _blocking(Files.mkdir)
    upload = _blocking(Files.upload)
    download = _blocking(Files.download)


class SyncSandbox(_Blocking[Sandbox]):
    """A blocking ``Sandbox``: the same methods with the same parameters, results and errors.

    Any thread may call, also one in which an event loop runs, such as a notebook's. Ctrl-C cancels a call and waits for
    its clean-up. Sandboxes that are still open when the interpreter exits are closed. A forked child cannot use the
    sandboxes of its parent: calls raise ``RuntimeError``, and closing does nothing.

    Example:
        ```python
        with SyncSandbox.create(ttl=600) as box:
            print(box.exec("echo hi").stdout)
        ```
    """

    def __init__(self, box: Sandbox) -> None:
        super().__init__(box)
        self.files = SyncFiles(box.files)
        self._portal.opened(box)

    @classmethod
    def create(
        cls,
        spec: SandboxSpec | str | None = None,
        *,
        backend: str | Backend = DEFAULT_BACKEND,
        snapshot: Snapshot | None = None,
        **fields: Any,
    ) -> SyncSandbox:
        """Create a sandbox and wait until it is ready; see ``Sandbox.create``."""
        return cls(portal().run(Sandbox.create(spec, backend=backend, snapshot=snapshot, **fields)))

    @classmethod
    def connect(cls, id: str, *, backend: str | Backend = DEFAULT_BACKEND) -> SyncSandbox:
        """Connect to an existing sandbox; see ``Sandbox.connect``."""
        return cls(portal().run(Sandbox.connect(id, backend=backend)))

    @classmethod
    def list(
        cls, *, labels: Mapping[str, str] | None = None, backend: str | Backend = DEFAULT_BACKEND
    ) -> builtins.list[Observed]:
        """Return the sandboxes of a back end; see ``Sandbox.list``."""
        return portal().run(Sandbox.list(labels=labels, backend=backend))

    @classmethod
    def discard(cls, snapshot: Snapshot, *, backend: str | Backend | None = None) -> None:
        """Remove a snapshot; see ``Sandbox.discard``."""
        portal().run(Sandbox.discard(snapshot, backend=backend))

    exec = _blocking(Sandbox.exec)
    ping = _blocking(Sandbox.ping)
    pause = _blocking(Sandbox.pause)
    resume = _blocking(Sandbox.resume)
    snapshot = _blocking(Sandbox.snapshot)
    restart = _blocking(Sandbox.restart)
    reset = _blocking(Sandbox.reset)
    extend = _blocking(Sandbox.extend)
    stats = _blocking(Sandbox.stats)
    logs = _blocking(Sandbox.logs)
    spawn = _blocking_as(SyncProcess, Sandbox.spawn)
    shell = _blocking_as(SyncShell, Sandbox.shell)

    def fork(self) -> SyncSandbox:
        """Create a copy; see ``Sandbox.fork``."""
        return type(self)(self._run(self._wrapped.fork()))

    def close(self, *, remove: bool | None = None) -> None:
        """Remove the sandbox; see ``Sandbox.close``. Does nothing in a forked child."""
        if not self._inherited:
            self._run(self._wrapped.close(remove=remove))
            self._portal.closed(self._wrapped)

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._inherited:
            self._run(self._wrapped.__aexit__(*error))
            self._portal.closed(self._wrapped)

    def events(self) -> Iterator[Transition]:
        """Yield state transitions; see ``Sandbox.events``."""
        return self._iterate(self._wrapped.events)

    @property
    def id(self) -> str:
        return self._wrapped.id

    @property
    def spec(self) -> SandboxSpec:
        return self._wrapped.spec

    @property
    def backend(self) -> Backend:
        return self._wrapped.backend

    @property
    def state(self) -> State:
        return self._wrapped.state

    @property
    def generation(self) -> int:
        return self._wrapped.generation

    @property
    def history(self) -> Sequence[Transition]:
        return self._look(lambda: self._wrapped.history)

    @property
    def loss(self) -> str | None:
        return self._wrapped.loss

    @property
    def info(self) -> SandboxInfo:
        return self._look(lambda: self._wrapped.info)

    def __repr__(self) -> str:
        return f"<Sync{repr(self._wrapped).lstrip('<')}"
