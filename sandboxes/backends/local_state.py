"""What the local back end writes down of each sandbox, so that any process of the user can find and handle it.

Invariant: a state is on disk before its processes start and is replaced whole. A process in it is known by number and
start time, so that a number that was given away again is never taken for the sandbox's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.local_cgroup import Group
from agentkit.sandboxes.owner import boot_id, start_of
from agentkit.sandboxes.spec import SandboxSpec


@dataclass(frozen=True)
class Known:
    """A process that is told from later ones of its number."""

    pid: int
    start: int
    """Clock ticks since the boot."""

    @classmethod
    def of(cls, pid: int) -> Known | None:
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
    """The boot in which its processes run."""
    processes: tuple[Known, ...] = ()
    """The launcher and the first process inside; empty until they run."""
    group: Group | None = None
    paused: bool = False
    exit_code: int | None = None
    oom_killed: bool = False
    ended: bool = False
    """This back end was asked to end these processes."""
    owns_workdir: bool = False
    """The working directory is one of the host's that was made for this sandbox."""

    @property
    def runs(self) -> bool:
        return bool(self.processes) and self.boot == boot_id() and self.processes[-1].runs

    def save(self) -> None:
        data = asdict(self) | {"spec": self.spec.model_dump_json()}
        path = _path(self.id)
        hidden = path.with_name(f".{self.id}.{secrets.token_hex(4)}")
        try:
            hidden.write_text(json.dumps(data))
            os.replace(hidden, path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def update(self) -> None:
        """Save it in place of what is there, unless the sandbox was removed meanwhile (its directory goes first)."""
        self.save()
        if not paths.sandbox_directory(self.id).exists():
            forget(self.id)


def load(id: str) -> LocalState | None:
    """None if there is none."""
    path = _path(id)
    try:
        status = path.stat()
        # Files are replaced, never changed: one that is the same file holds what it held.
        mark = (status.st_ino, status.st_mtime_ns)
        known = _read.get(path)
        if known is None or known[0] != mark:
            known = _read[path] = (mark, _parse(path.read_text()))
    except FileNotFoundError:
        _read.pop(path, None)
        return None
    return known[1]


_read: dict[Path, tuple[tuple[int, int], LocalState]] = {}
"""What was read last: whoever looks at all sandboxes twice a second need not understand them each time."""


def _parse(text: str) -> LocalState:
    data = json.loads(text)
    group = data.pop("group")
    return LocalState(
        **data
        | {
            "spec": SandboxSpec.model_validate_json(data["spec"]),
            "processes": tuple(Known(**known) for known in data["processes"]),
            "group": None if group is None else Group(**group),
        }
    )


def all_states() -> Iterator[LocalState]:
    for path in sorted(_directory().glob("ak-*.json")):
        state = load(path.stem) if paths.is_id(path.stem) else None
        if state is not None:
            yield state


def forget(id: str) -> None:
    """Remove the state and the log; nothing there is fine."""
    for path in (log_path(id), _path(id)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def log_path(id: str) -> Path:
    """Where the main process of a sandbox writes to."""
    return _path(id).with_suffix(".log")


def _path(id: str) -> Path:
    if not paths.is_id(id):
        raise ValueError(f"{id!r} is no sandbox id: ak- and 16 hexadecimal digits")
    return _directory() / f"{id}.json"


def _directory() -> Path:
    return paths.backend_directory("local")
