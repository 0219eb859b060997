"""Interfaces of a back end: ``Backend`` for the life cycle of sandboxes, ``Channel`` and ``Process`` for their use.

Invariant: a back end provides what the specification asks for or raises ``UnsupportedFeature``; it never substitutes
something weaker. When ``create`` fails or is cancelled, nothing that it made is left. All methods can be called
concurrently for different sandboxes, and every wait has a time limit.

``agentkit.sandboxes.testing.conformance`` is the executable specification. Third-party back ends are registered under
the entry-point group ``agentkit.sandbox_backends`` (``name = package.module:Class``).
"""

from __future__ import annotations

import abc
import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from typing import Any, ClassVar

from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, ExecRequest, ExecResult, FileInfo, Observed, Snapshot, Stats, Stream


class Process(abc.ABC):
    """A running command. Read its output with ``async for stream, data in process``."""

    @abc.abstractmethod
    def __aiter__(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield output as it is written, until both streams are closed or the command has ended.

        At most ``output_limit`` bytes are buffered; the program blocks while the reader is behind.
        """

    @abc.abstractmethod
    async def write(self, data: bytes) -> None:
        """Send ``data`` to standard input; return when it has been passed on.

        Raises:
            BrokenPipeError: the command has ended or closed its standard input.
            SandboxLost: the sandbox is lost.
        """

    @abc.abstractmethod
    async def close_stdin(self) -> None:
        """Close standard input."""

    @abc.abstractmethod
    async def kill(self, signal: int = 9) -> None:
        """Send a signal to the process group; do nothing if it has ended."""

    @abc.abstractmethod
    async def wait(self) -> ExecResult:
        """Wait for the end of the command.

        Returns:
            The result, without the output that was read by iteration.

        Raises:
            SandboxLost: the sandbox is lost.
        """


class Channel(abc.ABC):
    """The connection to one running sandbox. A lost channel stays lost; a restart returns a new one.

    All paths are absolute paths in the sandbox. Every method raises ``SandboxLost`` with the ``reason`` when the
    sandbox is or gets lost, and ``ProtocolError`` when the other side violates the protocol.

    Attributes:
        isolation: see ``SandboxInfo.isolation``.
        lost: a future that gets the reason when the connection ends (``closed`` after ``close``).
        heard: time of the last data from the other side, by the event loop's clock; constant if it is unknown.
    """

    isolation: str
    lost: asyncio.Future[str]
    heard: float = float("-inf")

    @property
    def host_silent(self) -> bool:
        """Whether the host of the sandbox does not answer: the silence of the sandbox means nothing then."""
        return False

    @abc.abstractmethod
    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end, at most once. Cancellation kills its process tree.

        Args:
            request: the resolved command.

        Returns:
            The exit code and the output. A command that exceeds its timeout is killed and has ``timed_out=True``.

        Raises:
            CommandNotFound: the program cannot be started.
        """

    @abc.abstractmethod
    async def spawn(self, request: ExecRequest) -> Process:
        """Start a command and return at once; it is killed after ``request.timeout`` seconds.

        Raises:
            CommandNotFound: the program cannot be started.
        """

    @abc.abstractmethod
    async def read(self, path: str, limit: int) -> bytes:
        """Return the content of a regular file.

        Args:
            path: the file.
            limit: largest size in bytes.

        Raises:
            PathError: there is no such file, or it is a directory, FIFO, device or socket.
            FileTooLarge: the file is larger than ``limit``.
        """

    async def stream(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        """Yield the content of a file in pieces, at the reader's pace. Raises like ``read``.

        The default implementation yields a single piece.
        """
        yield await self.read(path, limit)

    @abc.abstractmethod
    async def write(self, path: str, data: bytes, mode: int) -> None:
        """Create or replace a file atomically; create its parent directories.

        Args:
            path: the file.
            data: the content.
            mode: permission bits.

        Raises:
            PathError: the path cannot be written.
            DiskFull: there is not enough space.
        """

    @abc.abstractmethod
    async def list(self, path: str) -> list[FileInfo]:
        """Return the entries of a directory, sorted by name. Raises ``PathError``."""

    @abc.abstractmethod
    async def stat(self, path: str) -> FileInfo | None:
        """Return the description of a file; None if it does not exist."""

    @abc.abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file or a directory with its content, if it exists."""

    @abc.abstractmethod
    async def mkdir(self, path: str) -> None:
        """Create a directory and its parents, if they do not exist."""

    @abc.abstractmethod
    async def stats(self) -> Stats:
        """Return the resources that the sandbox uses."""

    @abc.abstractmethod
    async def ping(self, timeout: float) -> float:
        """Return the seconds of a round trip. Raises ``asyncio.TimeoutError`` after ``timeout`` seconds."""

    @abc.abstractmethod
    def lose(self, reason: str) -> None:
        """End the connection because the sandbox is lost: every pending call raises ``SandboxLost`` with ``reason``.

        Further calls have no effect.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """End the connection; the sandbox continues. May be called twice."""


class Backend(abc.ABC):
    """An engine that runs sandboxes. One instance serves many sandboxes, in one event loop.

    Attributes:
        name: the name under which the back end is registered.
    """

    name: ClassVar[str]

    def recipe(self) -> Mapping[str, Any] | None:
        """Return how the reaper, in another process, creates a back end that controls the same sandboxes.

        Returns:
            Keyword arguments of the class, as plain data. None if no sandbox can outlive its owner, or if another
            component removes it then.
        """
        return {}

    @property
    def concurrency(self) -> int:
        """Number of sandboxes that can be created, or removed, at one time without waiting for each other.

        By default, one for each processor of this machine, and at least two. Used once the back end was started.
        """
        return max(2, os.cpu_count() or 2)

    @abc.abstractmethod
    async def start(self) -> None:
        """Connect to the engine.

        Raises:
            EngineUnavailable: the engine does not answer; the message names the remedy.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Disconnect from the engine; sandboxes continue. May be called twice."""

    @property
    def storage(self) -> str:
        """A path on the disk of this machine that sandboxes and images fill."""
        return "/"

    @abc.abstractmethod
    def check(self, spec: SandboxSpec) -> None:
        """Raise ``UnsupportedFeature`` if this back end cannot provide what ``spec`` asks for."""

    async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
        """Fetch an image ahead of its first use.

        Args:
            image: the name of the image.
            timeout: seconds that fetching it may take.
            refresh: fetch it again if its name stands for a newer one now.

        Returns:
            Whether it was missing. Back ends without images return False.

        Raises:
            ImageError: the image cannot be obtained.
            EngineUnavailable: the engine does not answer.
        """
        return False

    async def remove_image(self, image: str, keep: Collection[str]) -> bool:
        """Remove an image; return False, and leave it, if a container uses it or its name or id is in ``keep``."""
        return False

    @abc.abstractmethod
    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        """Create and start a sandbox, and wait until it answers.

        Args:
            id: the name of the sandbox.
            spec: the specification.
            labels: labels of the owner and the reaper, which ``list`` returns.

        Returns:
            The channel of the sandbox.

        Raises:
            UnsupportedFeature: see ``check``.
            ImageError: the image cannot be obtained.
            StartTimeout: the sandbox did not start in time; ``details["phase"]`` names the phase.
            EngineUnavailable: the engine does not answer.
        """

    @abc.abstractmethod
    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        """Connect to a running sandbox of any owner.

        Raises:
            SandboxLost: there is no such sandbox, or it does not run.
        """

    @abc.abstractmethod
    async def restart(self, id: str) -> Channel:
        """Kill all processes of a sandbox and start it again, with empty tmpfs. Returns the new channel."""

    @abc.abstractmethod
    async def pause(self, id: str) -> None:
        """Freeze all processes of a sandbox."""

    @abc.abstractmethod
    async def resume(self, id: str) -> None:
        """Continue the processes of a paused sandbox."""

    @abc.abstractmethod
    async def snapshot(self, id: str, name: str) -> Snapshot:
        """Store the root file system and the tmpfs of a sandbox.

        To use it, call ``create`` with the image of the snapshot, then ``restore``.
        """

    @abc.abstractmethod
    async def restore(self, id: str, snapshot: Snapshot) -> None:
        """Replace the tmpfs of a sandbox with those of the snapshot."""

    @abc.abstractmethod
    async def discard(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, if it exists."""

    async def snapshots(self) -> Sequence[Observed]:
        """Return the snapshots that can outlive their owners, with the labels of the owners."""
        return ()

    @abc.abstractmethod
    async def remove(self, id: str) -> None:
        """Kill and remove a sandbox with its directories and networks, if it exists."""

    async def extend(self, id: str, ttl: float | None) -> None:  # noqa: B027
        """Note that the owner has extended the life of a sandbox.

        For back ends in which another component than the owner removes expired sandboxes.

        Args:
            id: the sandbox.
            ttl: seconds from now; None for no limit.
        """

    @abc.abstractmethod
    async def inspect(self, id: str) -> Observed:
        """Return the state of a sandbox, ``absent`` if it does not exist."""

    def host_of(self, id: str) -> str:
        """Return the name of the host on which sandbox ``id`` runs or ran: by default this machine's."""
        return socket.gethostname()

    def hosts(self) -> Sequence[Any]:
        """Return the state of each server that runs sandboxes; none if all sandboxes are on this machine."""
        return ()

    @abc.abstractmethod
    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        """Return all sandboxes of this back end, of any owner, that have these labels."""

    @abc.abstractmethod
    async def logs(self, id: str, tail: int) -> bytes:
        """Return the last ``tail`` lines of output of a sandbox's main process."""

    @abc.abstractmethod
    def events(self) -> AsyncIterator[BackendEvent]:
        """Yield events from now on. Ends or raises ``EngineUnavailable`` when the engine stops answering."""
