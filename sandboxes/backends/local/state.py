"""State files of local sandboxes, through which every process of the user can find and control them.

Invariant: the state is on disk before the processes start, and files are replaced as a whole. A process is identified
by its number and start time, so a reused number is never taken for a process of the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentkit.atomic_file import write_atomically
from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.local.cgroup import Cgroup
from agentkit.sandboxes.reaper.owner import boot_id, start_of
from agentkit.sandboxes.spec import SandboxSpec


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, distinguished from later ones with the same number."""

    pid: int
    start: int
    """Start time in clock ticks since the boot."""

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """None if there is no such process."""
        start = start_of(pid)
        return cls(pid, start) if isinstance(start, int) else None

    @property
    def runs(self) -> bool:
        return start_of(self.pid) == self.start


@dataclass(frozen=True)
class LocalState:
    """One sandbox of the local back end."""

    id: str
    spec: SandboxSpec
    labels: Mapping[str, str]
    created: float
    isolation: str
    boot: str
    """Id of the boot in which the processes were started."""
    processes: tuple[ProcessIdentity, ...] = ()
    """The launcher and the first process inside; empty before they run."""
    group: Cgroup | None = None
    paused: bool = False
    exit_code: int | None = None
    oom_killed: bool = False
    ended: bool = False
    """The back end was asked to end the processes."""
    owns_workdir: bool = False
    """The working directory is a directory of the host that was created for this sandbox."""

    @property
    def runs(self) -> bool:
        return bool(self.processes) and self.boot == boot_id() and self.processes[-1].runs

    def save(self) -> None:
        data = asdict(self) | {"spec": self.spec.model_dump_json()}
        write_atomically(_path(self.id), json.dumps(data))

    def update(self) -> None:
        """Save a change, unless the sandbox was removed meanwhile (its directory is removed first)."""
        self.save()
        if not paths.sandbox_directory(self.id).exists():
            forget(self.id)


def load(id: str) -> LocalState | None:
    """Return the state of a sandbox; None if there is none."""
    path = _path(id)
    try:
        status = path.stat()
        # Files are replaced, never changed: the same file has the same content.
        version = (status.st_ino, status.st_mtime_ns)
        if path not in _cache or _cache[path][0] != version:
            _cache[path] = (version, _parse(path.read_text()))
        return _cache[path][1]
    except FileNotFoundError:
        _cache.pop(path, None)
        return None


_cache: dict[Path, tuple[tuple[int, int], LocalState]] = {}
"""The parsed files: the event loop looks at all of them twice a second."""


def _parse(text: str) -> LocalState:
    data = json.loads(text)
    data["spec"] = SandboxSpec.model_validate_json(data["spec"])
    data["processes"] = tuple(ProcessIdentity(**process) for process in data["processes"])
    data["group"] = data["group"] and Cgroup(**data["group"])
    return LocalState(**data)


def all_states() -> Iterator[LocalState]:
    for path in sorted(paths.backend_directory("local").glob("ak-*.json")):
        state = load(path.stem) if paths.is_id(path.stem) else None
        if state is not None:
            yield state


def forget(id: str) -> None:
    """Remove the state and the log, if they exist."""
    for path in (log_path(id), _path(id)):
        path.unlink(missing_ok=True)


def log_path(id: str) -> Path:
    """Return the path of the output of a sandbox's main process."""
    return _path(id).with_suffix(".log")


def _path(id: str) -> Path:
    return paths.backend_directory("local") / f"{paths.checked_id(id)}.json"
