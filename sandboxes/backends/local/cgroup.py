"""Control groups (version 1 or 2) for local sandboxes: limits for all processes, freezing, and out-of-memory counts.

Invariant: a ``Cgroup`` limits memory and processes, or it is not used at all. It consists of one directory (version 2)
or one per controller (version 1), below directories that were tested. Removing it leaves no directory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentkit.sandboxes.spec import Resources

_PERIOD_US = 100_000
_TIMEOUT = 2.0
_V1_CONTROLLERS = ("memory", "pids", "freezer", "cpu", "cpuacct")
_REQUIRED = {"memory", "pids"}


@dataclass(frozen=True)
class Cgroup:
    """The control group of one sandbox; ``directories`` are keyed by controller, or by ``""`` in version 2."""

    directories: Mapping[str, str]

    @property
    def _unified(self) -> bool:
        return "" in self.directories

    @classmethod
    def of(cls, id: str, parents: Mapping[str, str]) -> Cgroup:
        """Return the group of sandbox ``id`` below ``parents`` without creating it.

        Groups are siblings: a group of version 2 with processes cannot have limited groups below it.
        """
        return cls({name: f"{directory}/agentkit-{id}" for name, directory in parents.items()})

    def create(self, resources: Resources) -> None:
        """Create the directories and set the limits. Raises ``OSError`` and then leaves nothing."""
        try:
            for directory in self.directories.values():
                os.makedirs(directory, exist_ok=True)
            for controller, file, value in limits(resources, self._unified):
                if path := self._file(controller, file):
                    path.write_text(value)
        except BaseException:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Add a process; the processes that it starts from then on belong to the group too."""
        for directory in self.directories.values():
            Path(directory, "cgroup.procs").write_text(str(pid))

    def processes(self) -> set[int]:
        found: set[int] = set()
        for directory in self.directories.values():
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in Path(directory, "cgroup.procs").read_text().split()}
        return found

    @property
    def limits_memory(self) -> bool:
        return self._file("memory", "memory.max" if self._unified else "memory.limit_in_bytes") is not None

    @property
    def freezes(self) -> bool:
        return self._file("freezer", "cgroup.freeze" if self._unified else "freezer.state") is not None

    def freeze(self, frozen: bool) -> None:
        """Freeze or thaw all processes and wait until that is done. Raises ``OSError``, ``TimeoutError`` after 2 s."""
        if self._unified:
            file, value, state, wanted = "cgroup.freeze", str(int(frozen)), "cgroup.events", f"frozen {int(frozen)}"
        else:
            file = state = "freezer.state"
            value = wanted = "FROZEN" if frozen else "THAWED"
        directory = Path(self.directories["" if self._unified else "freezer"])
        deadline = time.monotonic() + _TIMEOUT
        while True:
            (directory / file).write_text(value)
            if wanted in (directory / state).read_text().splitlines():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{directory} does not become {value}")
            time.sleep(0.002)

    def oom_kills(self) -> int:
        """Return the number of processes that the memory limit killed."""
        if path := self._file("memory", "memory.events" if self._unified else "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in path.read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the directories; wait up to two seconds for processes that are ending."""
        deadline = time.monotonic() + _TIMEOUT
        for directory in self.directories.values():
            while os.path.exists(directory):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)

    def _file(self, controller: str, name: str) -> Path | None:
        """Return the path of a file of the group; None if this kernel does not have it."""
        directory = self.directories.get("" if self._unified else controller)
        path = None if directory is None else Path(directory, name)
        return path if path is not None and path.exists() else None


def limits(resources: Resources, unified: bool) -> list[tuple[str, str, str]]:
    """Return the controller, file and value of each limit; a kernel may lack some of the files."""
    memory, pids = str(resources.memory), str(resources.pids)
    quota = str(max(1000, int(resources.cpus * _PERIOD_US)))
    if unified:
        return [
            ("memory", "memory.max", memory),
            ("memory", "memory.swap.max", "0"),
            ("pids", "pids.max", pids),
            ("cpu", "cpu.max", f"{quota} {_PERIOD_US}"),
        ]
    return [
        ("memory", "memory.limit_in_bytes", memory),
        ("memory", "memory.memsw.limit_in_bytes", memory),
        ("pids", "pids.max", pids),
        ("cpu", "cpu.cfs_period_us", str(_PERIOD_US)),
        ("cpu", "cpu.cfs_quota_us", quota),
    ]


def find() -> Mapping[str, str] | None:
    """Return the directories in which this process can create groups that limit memory and processes, by trial.

    Returns:
        The directories, keyed as in ``Cgroup``; None if there are none.
    """
    mounts, own = _mounts(), _own_groups()
    unified = _unified(Path(mounts[""]), own.get("", "/")) if "" in mounts else {}
    separate = {
        name: _own_directory(mounts[name], own[name]) for name in _V1_CONTROLLERS if name in mounts and name in own
    }
    for directories in (unified, separate):
        if ("" in directories or set(directories) >= _REQUIRED) and _works(directories):
            return directories
    return None


def _works(parents: Mapping[str, str]) -> bool:
    group = Cgroup.of(f"try-{secrets.token_hex(4)}", parents)
    try:
        group.create(Resources())
        return group.limits_memory
    except OSError:
        return False
    finally:
        group.remove()


def _unified(mount: Path, own: str) -> dict[str, str]:
    """Return the nearest ancestor group below which groups can set limits; empty if there is none."""
    directory = Path(_own_directory(str(mount), own))
    while True:
        with contextlib.suppress(OSError):
            control = directory / "cgroup.subtree_control"
            if not set(control.read_text().split()) >= _REQUIRED:
                control.write_text("+memory +pids +cpu")
            if os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK):
                return {"": str(directory)}
        if directory == mount or mount not in directory.parents:
            return {}
        directory = directory.parent


def _own_directory(mount: str, own: str) -> str:
    """Return this process's group below a mount; in a container, the mount itself may be the group."""
    directory = mount + own.rstrip("/")
    return directory if os.path.exists(directory + "/cgroup.procs") else mount


def _mounts() -> dict[str, str]:
    """Return the mount of each controller; ``""`` is version 2, if it has the required controllers."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = before.split()[4], after.split()[:3]
        if kind == "cgroup":
            found |= dict.fromkeys(set(options.split(",")) & set(_V1_CONTROLLERS), mount)
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                if set(Path(mount, "cgroup.controllers").read_text().split()) >= _REQUIRED:
                    found[""] = mount
    return found


def _own_groups() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found
