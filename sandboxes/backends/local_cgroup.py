"""Control groups for sandboxes without a container engine: limits for the whole tree, freezing, and what ran out of
memory. Of version 1 or 2, whichever this user may write to.

Invariant: a ``Group`` is one directory (version 2) or one a controller (version 1), made below a ``Site`` that was
tried, and limits memory and processes, or it is not used at all. Removing one leaves no directory behind.
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
_WAIT = 2.0
_V1 = ("memory", "pids", "freezer", "cpu", "cpuacct")
_NEEDED = {"memory", "pids"}


@dataclass(frozen=True)
class Group:
    """The control group of one sandbox: controller → directory, with the one key ``""`` for version 2."""

    directories: Mapping[str, str]

    @property
    def unified(self) -> bool:
        return "" in self.directories

    def make(self, resources: Resources) -> None:
        """Raises ``OSError``; what was made is gone then."""
        try:
            for directory in self.directories.values():
                os.makedirs(directory, exist_ok=True)
            for controller, file, value in limits(resources, self.unified):
                path = self._file(controller, file)
                if path is not None and path.exists():
                    path.write_text(value)
        except BaseException:
            self.remove()
            raise

    def add(self, pid: int) -> None:
        """Put a process into it; what it starts from then on is in it too."""
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
        path = self._file("memory", "memory.max" if self.unified else "memory.limit_in_bytes")
        return path is not None and path.exists()

    @property
    def limits_cpu(self) -> bool:
        path = self._file("cpu", "cpu.max" if self.unified else "cpu.cfs_quota_us")
        return path is not None and path.exists()

    @property
    def freezes(self) -> bool:
        path = self._file("freezer", "cgroup.freeze" if self.unified else "freezer.state")
        return path is not None and path.exists()

    def freeze(self, frozen: bool) -> None:
        """Returns when it is so. Raises ``OSError``, ``TimeoutError`` after two seconds."""
        if self.unified:
            file, value, state, wanted = "cgroup.freeze", str(int(frozen)), "cgroup.events", f"frozen {int(frozen)}"
        else:
            file = state = "freezer.state"
            value = wanted = "FROZEN" if frozen else "THAWED"
        directory = Path(self.directories["" if self.unified else "freezer"])
        deadline = time.monotonic() + _WAIT
        while True:
            (directory / file).write_text(value)
            if wanted in (directory / state).read_text().splitlines():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{directory} does not become {value}")
            time.sleep(0.002)

    def oom_kills(self) -> int:
        """Processes that were killed for memory."""
        path = self._file("memory", "memory.events" if self.unified else "memory.oom_control")
        with contextlib.suppress(OSError, AttributeError):
            for line in path.read_text().splitlines():  # pyright: ignore[reportOptionalMemberAccess]
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the directories; processes that still end in them are waited for, two seconds at most."""
        deadline = time.monotonic() + _WAIT
        for directory in self.directories.values():
            while True:
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() < deadline:
                        time.sleep(0.005)
                        continue
                break

    def _file(self, controller: str, name: str) -> Path | None:
        directory = self.directories.get("" if self.unified else controller)
        return None if directory is None else Path(directory, name)


@dataclass(frozen=True)
class Site:
    """Where groups can be made: controller → directory, as in ``Group``."""

    directories: Mapping[str, str]

    def group(self, id: str) -> Group:
        """The group of sandbox ``id``; not made."""
        # Side by side, for a group of version 2 that has groups of its own would have to pass its controllers on.
        return Group({name: f"{directory}/agentkit-{id}" for name, directory in self.directories.items()})


def limits(resources: Resources, unified: bool) -> list[tuple[str, str, str]]:
    """What is to be written: controller, file, value. Files that a kernel lacks are left out by whoever writes."""
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


def find() -> Site | None:
    """Where this process may make groups that limit memory and processes; None if nowhere. Tries it."""
    mounts, own = _mounts(), _own_groups()
    unified = _unified(Path(mounts[""]), own.get("", "/")) if "" in mounts else {}
    separate = {name: _own_directory(mounts[name], own[name]) for name in _V1 if name in mounts and name in own}
    for directories in (unified, separate):
        if ("" in directories or set(directories) >= _NEEDED) and _works(Site(directories)):
            return Site(directories)
    return None


def _works(site: Site) -> bool:
    group = site.group(f"try-{secrets.token_hex(4)}")
    try:
        group.make(Resources())
        return group.limits_memory
    except OSError:
        return False
    finally:
        group.remove()


def _unified(mount: Path, own: str) -> dict[str, str]:
    """The nearest group above this process below which groups can limit; empty if there is none."""
    directory = Path(_own_directory(str(mount), own))
    while True:
        with contextlib.suppress(OSError):
            control = directory / "cgroup.subtree_control"
            if not set(control.read_text().split()) >= _NEEDED:
                control.write_text("+memory +pids +cpu")
            if os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK):
                return {"": str(directory)}
        if directory == mount or mount not in directory.parents:
            return {}
        directory = directory.parent


def _own_directory(mount: str, own: str) -> str:
    """This process's group below a mount, which in a container shows it as its root."""
    directory = mount + own.rstrip("/")
    return directory if os.path.exists(directory + "/cgroup.procs") else mount


def _mounts() -> dict[str, str]:
    """Controller → where it is mounted; ``""`` is version 2, if that has what is needed."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount, (kind, _, options) = before.split()[4], after.split()[:3]
        if kind == "cgroup":
            found |= dict.fromkeys(set(options.split(",")) & set(_V1), mount)
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                if set(Path(mount, "cgroup.controllers").read_text().split()) >= _NEEDED:
                    found[""] = mount
    return found


def _own_groups() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found
