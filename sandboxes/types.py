"""Requests and results of sandboxes: immutable values that can be sent, stored and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal[
    "pending", "creating", "starting", "ready", "busy", "paused", "degraded", "unhealthy", "recovering", "stopping",
    "removed", "failed",
]  # fmt: skip
"""States of a sandbox; ``lifecycle.TRANSITIONS`` lists the transitions."""

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class ExecRequest:
    """A command for a back end, with all defaults filled in."""

    argv: tuple[str, ...]
    timeout: float
    """Seconds until the whole process tree is killed."""
    output_limit: int
    """Bytes kept of each stream: one half from its beginning, one from its end."""
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the sandbox."""
    stdin: bytes = b""
    idempotency_key: str | None = None
    """A second request with this key returns the result of the first one."""


@dataclass(frozen=True)
class ExecResult:
    """Result of a command."""

    exit_code: int | None
    """Exit status; ``128 + signal`` if a signal ended the command; None if it timed out."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    duration: float
    """Seconds, measured in the sandbox."""
    timed_out: bool = False
    truncated: bool = False
    """The middle of the output was removed because of ``output_limit``."""
    oom_killed: bool = False
    """The memory limit killed a process of this sandbox while the command ran."""
    signal: int | None = None
    """The signal that ended the command."""
    tainted: bool = False
    """Processes of the command survived their kill: the sandbox accepts no more commands until it is restarted."""

    @property
    def stdout(self) -> str:
        """Standard output as text; invalid UTF-8 is replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; invalid UTF-8 is replaced."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the exit status is 0."""
        return self.exit_code == 0


@dataclass(frozen=True)
class FileInfo:
    """A file or directory in a sandbox. Symbolic links are not followed."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    """Permission bits."""
    modified: float
    """Seconds since the epoch, by the sandbox's clock."""


@dataclass(frozen=True)
class Stats:
    """Present use of resources. Bytes and seconds; None if the back end does not know."""

    memory: int | None
    memory_limit: int | None
    cpu_seconds: float | None
    processes: int | None
    oom_kills: int | None
    """Processes killed by the memory limit since the start."""
    workspace_used: int | None = None
    workspace_size: int | None = None


@dataclass(frozen=True)
class Observed:
    """A sandbox as its back end sees it, of any owner."""

    id: str
    state: Literal["running", "paused", "exited", "absent"]
    labels: Mapping[str, str]
    exit_code: int | None = None
    oom_killed: bool = False
    created: float | None = None
    """Seconds since the epoch."""
    external: bool = False
    """It ended because of a request to the engine, which code in the sandbox cannot send."""


@dataclass(frozen=True)
class BackendEvent:
    """An event of a sandbox, reported by its back end's engine."""

    id: str
    kind: Literal["died", "oom", "paused", "resumed", "removed"]
    exit_code: int | None = None


@dataclass(frozen=True)
class Transition:
    """One change of a sandbox's state."""

    before: State
    after: State
    cause: str
    generation: int
    """Number of starts; shells and processes of an earlier generation are lost."""
    wall: float
    """Seconds since the epoch."""
    monotonic: float
    """Seconds of the event loop's clock."""


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as its owner sees it."""

    id: str
    backend: str
    state: State
    generation: int
    isolation: str
    """Isolation from the host: ``container``, ``gvisor``, ``bubblewrap``, ``namespaces``, …"""
    loosened: tuple[str, ...]
    """Fields of the specification that weaken the default isolation."""
    labels: Mapping[str, str]
    created: float
    expires: float | None
    """Seconds since the epoch at which the time to live ends."""
    tainted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """Saved files of a sandbox, from which other sandboxes can be created."""

    id: str
    backend: str
    image: str
    """The image with the root file system."""
    archive: str | None
    """Host path of a tar file of the tmpfs, or None if they were empty."""
