"""What a back end must do: life cycle in ``Backend``, everything hot in ``Channel``, both small.

Invariant: a back end gives what the specification asks for or raises ``UnsupportedFeature``; it never puts something
weaker in its place. Whatever ``create`` had made when it failed or was cancelled is gone when it returns. All methods
are safe to call concurrently for different sandboxes, and each ends: nothing waits without a bound.

``tests/sandboxes/conformance.py`` is the specification in executable form. Third parties register theirs under the
entry-point group ``agentkit.sandbox_backends`` (``name = package.module:Class``).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, ExecRequest, ExecResult, FileInfo, Observed, Snapshot, Stats, Stream


class Process(abc.ABC):
    """A command that runs on: read its output by ``async for stream, data in process``."""

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Output as it comes; ends when both streams are closed or the command has ended. The reader's pace holds the
        program back: at most ``output_limit`` bytes wait."""

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Send to standard input; returns when it is on its way. Raises ``SandboxLost``, or ``BrokenPipeError``."""

    @abc.abstractmethod
    async def close_stdin(self) -> None: ...

    @abc.abstractmethod
    async def kill(self, signal: int = 9) -> None:
        """Signal the whole process group; done if it has ended already."""

    @abc.abstractmethod
    async def wait(self) -> ExecResult:
        """How it ended; output that was iterated over is not repeated in it."""


class Channel(abc.ABC):
    """The connection to one running sandbox. Lost once, lost for ever: a restart gives a new one.

    Every method raises ``SandboxLost`` (with its ``reason``) when the sandbox is gone or goes while it waits, and
    ``ProtocolError`` if the other side breaks the protocol. Paths are absolute paths in the sandbox.
    """

    isolation: str
    """See ``SandboxInfo.isolation``."""
    lost: asyncio.Future[str]
    """Gets the reason when the connection ends, whoever ended it (``closed`` for ``close``)."""
    heard: float = float("-inf")
    """When the other side sent anything last, in the event loop's time; stays as it is where that is not known."""

    @abc.abstractmethod
    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end, at most once. Cancelling kills the process tree.

        Raises ``CommandNotFound`` if nothing could be started.
        """

    @abc.abstractmethod
    async def spawn(self, request: ExecRequest) -> Process:
        """Start a command and return at once; ``request.timeout`` bounds its life."""

    @abc.abstractmethod
    async def read(self, path: str, limit: int) -> bytes:
        """A regular file's content. Raises ``PathError`` (also for FIFOs, devices, sockets), ``FileTooLarge``."""

    async def stream(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        """The same in pieces, as the reader takes them; one that cannot hold its sandbox back gives a single piece."""
        yield await self.read(path, limit)

    @abc.abstractmethod
    async def write(self, path: str, data: bytes, mode: int) -> None:
        """Replace or create a file at once, or not at all; parents are made. Raises ``PathError``, ``DiskFull``."""

    @abc.abstractmethod
    async def list(self, path: str) -> list[FileInfo]:
        """A directory's entries, by name. Raises ``PathError``."""

    @abc.abstractmethod
    async def stat(self, path: str) -> FileInfo | None:
        """None if there is nothing."""

    @abc.abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory; nothing there is fine."""

    @abc.abstractmethod
    async def mkdir(self, path: str) -> None:
        """Make a directory and its parents; one there already is fine."""

    @abc.abstractmethod
    async def stats(self) -> Stats: ...

    @abc.abstractmethod
    async def ping(self, timeout: float) -> float:
        """Seconds of a round trip. Raises ``asyncio.TimeoutError``."""

    @abc.abstractmethod
    def lose(self, reason: str) -> None:
        """End the connection because the sandbox is lost: all that waits on it raises ``SandboxLost`` with ``reason``
        at once. The first reason stays."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the connection, not the sandbox. Twice is fine."""


class Backend(abc.ABC):
    """Where sandboxes live. One instance serves many of them, in one event loop."""

    name: ClassVar[str]

    def recipe(self) -> Mapping[str, Any] | None:
        """Keyword arguments, plain data, with which the reaper (another process) makes a back end of this class that
        sees the same sandboxes. None if no sandbox can outlive its owner, or someone else removes it then."""
        return {}

    @abc.abstractmethod
    async def start(self) -> None:
        """Connect to the engine. Raises ``EngineUnavailable`` with the remedy."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the engine; sandboxes stay as they are. Twice is fine."""

    @abc.abstractmethod
    def check(self, spec: SandboxSpec) -> None:
        """Raise ``UnsupportedFeature`` for what this back end cannot give."""

    @abc.abstractmethod
    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        """Make and start a sandbox named ``id`` and return when it answers.

        ``labels`` (the owner's and the reaper's) come back from ``list``. Raises ``ImageError``, ``StartTimeout``
        (with the phase), ``EngineUnavailable``.
        """

    @abc.abstractmethod
    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        """Connect to a running sandbox, whoever made it. Raises ``SandboxLost`` if there is none."""

    @abc.abstractmethod
    async def restart(self, id: str) -> Channel:
        """Kill whatever runs in it and start it again; the tmpfs are empty afterwards."""

    @abc.abstractmethod
    async def pause(self, id: str) -> None:
        """Freeze all its processes."""

    @abc.abstractmethod
    async def resume(self, id: str) -> None: ...

    @abc.abstractmethod
    async def snapshot(self, id: str, name: str) -> Snapshot:
        """Keep the root file system and the tmpfs. ``create`` with the snapshot's image, then ``restore``."""

    @abc.abstractmethod
    async def restore(self, id: str, snapshot: Snapshot) -> None:
        """Put the snapshot's tmpfs in place of those of sandbox ``id``."""

    @abc.abstractmethod
    async def discard(self, snapshot: Snapshot) -> None:
        """Remove what a snapshot holds; nothing there is fine."""

    async def snapshots(self) -> Sequence[Observed]:
        """The snapshots that can outlive their owners, by name, with their owners' labels (``lease.Lease.labels``)."""
        return ()

    @abc.abstractmethod
    async def remove(self, id: str) -> None:
        """Kill and remove, with all that belongs to it (directories, networks); nothing there is fine."""

    async def extend(self, id: str, ttl: float | None) -> None:  # noqa: B027
        """The owner gave ``id`` ``ttl`` more seconds from now, or all its own life: for back ends where someone other
        than the owner ends what has outlived its time."""

    @abc.abstractmethod
    async def inspect(self, id: str) -> Observed: ...

    @abc.abstractmethod
    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        """All sandboxes of this back end that carry these labels, whoever made them."""

    @abc.abstractmethod
    async def logs(self, id: str, tail: int) -> bytes:
        """The last ``tail`` lines that the sandbox's main process wrote."""

    @abc.abstractmethod
    def events(self) -> AsyncIterator[BackendEvent]:
        """What happens from now on. Ends or raises ``EngineUnavailable`` when the engine goes away."""
