"""What goes into a sandbox and what comes out: plain, immutable data.

Invariant: output is bytes, exactly as the program wrote them; text is a view of it that never fails. Nothing here holds
a reference to a back end, so that every value can be sent, stored and compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal[
    "pending", "creating", "starting", "ready", "busy", "paused", "degraded", "unhealthy", "recovering", "stopping",
    "removed", "failed",
]  # fmt: skip
"""States of a sandbox; ``lifecycle`` says which follow which."""

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class ExecRequest:
    """One command, fully resolved: what a back end runs."""

    argv: tuple[str, ...]
    timeout: float
    """Seconds until the whole process tree is killed."""
    output_limit: int
    """Bytes kept of each stream: half from its beginning, half from its end."""
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the sandbox."""
    stdin: bytes = b""
    idempotency_key: str | None = None
    """Two requests of one key run once; the second gets the first one's result."""


@dataclass(frozen=True)
class ExecResult:
    """How a command ended."""

    exit_code: int | None
    """What the command returned; ``128 + signal`` if a signal ended it; None if it was killed for its timeout."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    duration: float
    """Seconds, by the clock next to the process."""
    timed_out: bool = False
    truncated: bool = False
    """Output beyond ``output_limit`` was left out of the middle."""
    oom_killed: bool = False
    """The memory limit killed a process of this sandbox while the command ran."""
    signal: int | None = None
    """The signal that ended the command."""
    tainted: bool = False
    """Processes of the command survived its end and its kill: the sandbox must not be used again."""

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class FileInfo:
    """An entry of a directory in a sandbox. Symbolic links are not followed."""

    path: str
    kind: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    """Permission bits."""
    modified: float
    """Seconds since the epoch, by the sandbox's clock."""


@dataclass(frozen=True)
class Stats:
    """What a sandbox uses now. Bytes and seconds; None where the back end cannot tell."""

    memory: int | None
    memory_limit: int | None
    cpu_seconds: float | None
    processes: int | None
    oom_kills: int | None
    """Processes that the memory limit killed since the start."""
    workspace_used: int | None = None
    workspace_size: int | None = None


@dataclass(frozen=True)
class Observed:
    """What a back end says of one sandbox, whoever made it."""

    id: str
    state: Literal["running", "paused", "exited", "absent"]
    labels: Mapping[str, str]
    exit_code: int | None = None
    oom_killed: bool = False
    created: float | None = None
    """Seconds since the epoch."""
    external: bool = False
    """It ended at a request to the engine, which code in the sandbox cannot make."""


@dataclass(frozen=True)
class BackendEvent:
    """Something that happened to a sandbox, seen by its back end's engine."""

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
    """Counts (re)starts: what belongs to an earlier generation is lost."""
    wall: float
    """Seconds since the epoch."""
    monotonic: float
    """Seconds of the clock that never jumps."""


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as its owner sees it."""

    id: str
    backend: str
    state: State
    generation: int
    isolation: str
    """What stands between the sandbox and the host: ``container``, ``gvisor``, ``bubblewrap``, ``namespaces``, …"""
    loosened: tuple[str, ...]
    """Fields of the specification that weaken the defaults."""
    labels: Mapping[str, str]
    created: float
    expires: float | None
    """Seconds since the epoch at which the time to live ends."""
    tainted: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A sandbox's files at one moment, from which others can be made."""

    id: str
    backend: str
    image: str
    """The image that holds the root file system at that moment."""
    archive: str | None
    """Host path of a tar file of the writable tmpfs, or None where they were empty."""
