"""Isolation of local sandboxes: command lines that run a program in name spaces, or with resource limits only.

Invariant: the program runs without privileges on the host, without capabilities, without a way to gain privileges, and
(except for ``rlimits``) without network and without access to the host's files. ``check_support`` refuses what an
isolation cannot provide.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes.agent.launch import command
from agentkit.sandboxes.backends.docker import options as docker_options
from agentkit.sandboxes.backends.local import namespaces
from agentkit.sandboxes.backends.local.cgroup import Cgroup
from agentkit.sandboxes.backends.local.filesystem import (
    ENVIRONMENT,
    HIDDEN_PROC,
    PROBE_TIMEOUT,
    FileEntry,
    entries,
    output,
    python,
)
from agentkit.sandboxes.paths import MOUNT
from agentkit.sandboxes.spec import SandboxSpec

IsolationLevel = Literal["bubblewrap", "namespaces", "rlimits"]


@dataclass
class LaunchContext:
    """One start of a sandbox, and the descriptors that its launcher inherits."""

    spec: SandboxSpec
    directory: Path
    group: Cgroup | None
    info: int
    """The launcher writes the number of the first process inside to it, as JSON with the key ``child-pid``."""
    release: int
    """The first process inside waits for a byte from it before it runs anything."""
    lifeline: int = -1
    """The end of a pipe that the launcher holds open; the agent ends with it. Only ``Bubblewrap`` uses one."""
    lasting: bool = False
    """The sandbox may outlive the thread that starts it."""
    fds: list[int] = field(default_factory=list)
    """All descriptors that the launcher inherits."""

    def __post_init__(self) -> None:
        self.fds += [self.info, self.release]

    def data(self, content: bytes) -> int:
        """Return a descriptor from which ``content`` can be read."""
        fd = os.memfd_create("agentkit")
        self.fds.append(fd)
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Isolation(ABC):
    """A method to isolate a program."""

    level: ClassVar[IsolationLevel]

    @abstractmethod
    def command(self, launch: LaunchContext, program: list[str]) -> list[str]:
        """Return the command line of a launcher that runs ``program`` inside."""

    @abstractmethod
    def agent(self, launch: LaunchContext) -> list[str]:
        """Return the command line of the agent, as seen from inside."""

    def missing(self) -> str:
        """Return what this machine lacks; empty if only a trial can show it."""
        return ""

    def problem(self) -> str:
        """Return why this machine cannot use the isolation; empty if a trial succeeds."""
        if missing := self.missing():
            return missing
        release, writer = os.pipe()
        os.write(writer, b"\n")
        os.close(writer)
        info = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        launch = LaunchContext(SandboxSpec(), Path("/usr"), None, info, release)
        trial = [python(), "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))"]
        try:
            result = subprocess.run(
                self.command(launch, trial),
                pass_fds=launch.fds,
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT,
                check=False,
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"a trial failed: {error}"
        finally:
            launch.close()
        if result.returncode == 0:
            return ""
        return f"a trial failed: {result.stderr.strip() or f'Python {python()} is older than 3.8'}"


class Bubblewrap(Isolation):
    """Name spaces and a private file system, created by ``bwrap``. The agent is process 1.

    If this process is root, the agent has another user than ``bwrap``, which drops its capabilities: the death of
    ``bwrap`` cannot signal the agent, so the agent watches a pipe that ``bwrap`` holds open.
    """

    level: ClassVar[IsolationLevel] = "bubblewrap"

    def __init__(self) -> None:
        self._options = ""

    def missing(self) -> str:
        program = shutil.which("bwrap")
        if program is None:
            return "bwrap is not installed: apt-get install bubblewrap"
        self._options = output([program, "--help"])
        required = ("--size", "--perms", "--clearenv", "--as-pid-1", "--json-status-fd")
        lacking = [option for option in required if option not in self._options]
        return f"{program} is too old: it lacks {', '.join(lacking)}" if lacking else ""

    def agent(self, launch: LaunchContext) -> list[str]:
        reader, launch.lifeline = os.pipe()
        launch.fds += [reader, launch.lifeline]
        return command(MOUNT, python(), reader)

    def command(self, launch: LaunchContext, program: list[str]) -> list[str]:
        options = [
            *self._user(launch.spec),
            "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--as-pid-1", "--hostname", "sandbox", "--new-session",
            *(() if launch.lasting else ("--die-with-parent",)),
            "--info-fd", str(launch.info), "--block-fd", str(launch.release),
            *(("--json-status-fd", str(launch.lifeline)) if launch.lifeline >= 0 else ()),
            "--clearenv", *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *_mount_options(launch, entries(launch.spec, launch.directory, launch.group)), "--chdir", "/",
        ]  # fmt: skip
        # Through a descriptor: programs can read the command line of process 1, and the options name paths of the host.
        arguments = launch.data(b"".join(os.fsencode(word) + b"\0" for word in options))
        return ["bwrap", "--args", str(arguments), "--", *_as_user(launch.spec), *_limited(launch), *program]

    def _user(self, spec: SandboxSpec) -> list[str]:
        """Return the options for the user: a user name space, or another user if this process is root."""
        if os.geteuid() == 0:
            needed = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # dropped by `_as_user`
            return ["--cap-drop", "ALL", *(word for name in needed for word in ("--cap-add", name))]
        uid, gid = spec.user.split(":")
        words = ["--cap-drop", "ALL", "--unshare-user", "--uid", uid, "--gid", gid]
        return [*words, "--disable-userns"] if "--disable-userns" in self._options else words


class Namespaces(Isolation):
    """Like ``Bubblewrap``, with the script ``namespaces.py``, for machines without ``bwrap``."""

    level: ClassVar[IsolationLevel] = "namespaces"

    def agent(self, launch: LaunchContext) -> list[str]:
        return command(MOUNT, python())

    def command(self, launch: LaunchContext, program: list[str]) -> list[str]:
        plan = {
            "info": launch.info,
            "release": launch.release,
            "lasting": launch.lasting,
            "user": [int(number) for number in launch.spec.user.split(":")],
            "files": [asdict(entry) for entry in entries(launch.spec, launch.directory, launch.group)],
            "hidden": HIDDEN_PROC,
            "environment": ENVIRONMENT,
            "command": [*_limited(launch), *program],
        }
        script = namespaces.__file__
        return [sys.executable, "-I", "-S", script, str(launch.data(json.dumps(plan).encode()))]


class Rlimits(Isolation):
    """Limits for each process only: the sandbox can access everything that this user can."""

    level: ClassVar[IsolationLevel] = "rlimits"

    def missing(self) -> str:
        found = shutil.which("setpriv") and shutil.which("prlimit")
        return "" if found else "setpriv and prlimit (util-linux) are missing"

    def agent(self, launch: LaunchContext) -> list[str]:
        return command(str(launch.directory), sys.executable)

    def command(self, launch: LaunchContext, program: list[str]) -> list[str]:
        wait = [sys.executable, "-I", "-S", "-c", _WAIT, str(launch.info), str(launch.release)]
        # The agent kills everything that it started when it gets SIGTERM.
        ending = () if launch.lasting else ("--pdeathsig", "TERM")
        return ["setpriv", *ending, "--no-new-privs", *wait, *_limited(launch), *program]


_WAIT = """\
import os, sys
info, release = int(sys.argv[1]), int(sys.argv[2])
os.write(info, b'{"child-pid": %d}' % os.getpid())
os.close(info)
if not os.read(release, 1):
    sys.exit(1)
os.close(release)
os.execvp(sys.argv[3], sys.argv[3:])
"""

ISOLATIONS: dict[IsolationLevel, type[Isolation]] = {
    isolation.level: isolation for isolation in (Bubblewrap, Namespaces, Rlimits)
}


def check_support(spec: SandboxSpec, level: IsolationLevel) -> None:
    """Raise ``UnsupportedFeature`` for what this isolation cannot provide."""
    requested = {
        f"runtime={spec.runtime}": spec.runtime is not None,
        "resources.gpus": spec.resources.gpus is not None,
        "cap_add": bool(spec.cap_add),
    }
    if level == "rlimits":
        myself = f"{os.geteuid()}:{os.getegid()}"
        requested |= {
            f"network={spec.network.mode} (only bridge, the network of the host)": spec.network.mode != "bridge",
            "readonly_root=True": spec.readonly_root,
            "mounts": bool(spec.mounts),
            f"user={spec.user} (only {myself}, the user of this process)": spec.user != myself,
        }
    else:
        requested |= {
            "network=bridge": spec.network.mode == "bridge",
            "readonly_root=False": not spec.readonly_root,
            f"user={spec.user} (it would also be root outside)": os.geteuid() == 0 and spec.user.startswith("0:"),
        }
    refused = [name for name, wanted in requested.items() if wanted]
    if refused:
        problems = ", ".join(refused)
        raise UnsupportedFeature(f"local sandboxes ({level}) do not support {problems}; change it, or use docker")
    docker_options.check(spec, (), os.cpu_count() or 1)


def _mount_options(launch: LaunchContext, entries: Iterable[FileEntry]) -> list[str]:
    created = {"/", "/usr", "/dev", "/proc", "/tmp"}
    options = []
    for entry in entries:
        # bwrap would create the parents readable for its own user only.
        for parent in reversed(Path(entry.target).parents):
            if str(parent) not in created:
                created.add(str(parent))
                options += ["--perms", "0755", "--dir", str(parent)]
        options += _entry_options(launch, entry)
    return [*options, "--remount-ro", "/"]


def _entry_options(launch: LaunchContext, entry: FileEntry) -> list[str]:
    if entry.kind == "bind":
        return ["--ro-bind" if entry.read_only else "--bind", entry.source, entry.target]
    if entry.kind == "link":
        return ["--symlink", entry.source, entry.target]
    if entry.kind == "text":
        return ["--perms", "0644", "--ro-bind-data", str(launch.data(entry.source.encode())), entry.target]
    if entry.kind == "tmpfs":
        return ["--perms", "1777", "--size", str(entry.size), "--tmpfs", entry.target]
    if entry.kind == "proc":
        hidden = (f"{entry.target}/{name}" for name in HIDDEN_PROC if os.path.exists(f"/proc/{name}"))
        return ["--proc", entry.target, *(word for path in hidden for word in ("--ro-bind", "/dev/null", path))]
    shm = ["--perms", "1777", "--size", str(entry.size), "--tmpfs", f"{entry.target}/shm"]
    return ["--dev", entry.target, *shm, "--remount-ro", entry.target]


def _limited(launch: LaunchContext) -> list[str]:
    """Return the prefix of a command that limits each process."""
    resources = launch.spec.resources
    limits = {"core": 0, "nofile": resources.nofile}
    if launch.group is None:
        # Per process, and per user in a user name space: the closest limits without control groups.
        limits |= {"as": resources.memory, "nproc": resources.pids}
    return ["prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]


def _as_user(spec: SandboxSpec) -> list[str]:
    """Return the prefix of a command that drops root's privileges; empty if this process is not root."""
    if os.geteuid() != 0:
        return []
    uid, gid = spec.user.split(":")
    return [
        "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
        "--no-new-privs", "--",
    ]  # fmt: skip
