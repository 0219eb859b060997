"""What stands around a local sandbox: command lines that put a program behind name spaces, or behind limits alone.

Invariant: the program runs as a user without rights on the host where this process has any to give up, without
capabilities, without a way to new privileges, and (but for ``rlimits``, which says so in its name) without network and
without sight of the host. What a cage cannot give is refused by ``unsupported``.
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
from agentkit.sandboxes.agent_config import command
from agentkit.sandboxes.backends import docker_options, namespaces
from agentkit.sandboxes.backends.local_cgroup import Group
from agentkit.sandboxes.backends.local_view import (
    ENVIRONMENT,
    HIDDEN_PROC,
    PROBE_TIMEOUT,
    Entry,
    output,
    python,
    view,
)
from agentkit.sandboxes.paths import MOUNT
from agentkit.sandboxes.spec import SandboxSpec

Isolation = Literal["bubblewrap", "namespaces", "rlimits"]


@dataclass
class Launch:
    """One start of one sandbox, and the descriptors that it hands on."""

    spec: SandboxSpec
    directory: Path
    group: Group | None
    info: int
    """Where the cage writes the number of the first process inside, as JSON with the key ``child-pid``."""
    gate: int
    """What that process waits on before it runs anything."""
    lifeline: int = -1
    """A pipe's end that the launcher holds open while it lives; the agent ends with it. Only where a cage makes one."""
    fds: list[int] = field(default_factory=list)
    """All descriptors that the launcher gets."""

    def __post_init__(self) -> None:
        self.fds += [self.info, self.gate]

    def data(self, content: bytes) -> int:
        """A descriptor from which ``content`` can be read."""
        fd = os.memfd_create("agentkit")
        self.fds.append(fd)
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class Cage(ABC):
    """One way to keep a program in."""

    level: ClassVar[Isolation]

    @abstractmethod
    def command(self, launch: Launch, program: list[str]) -> list[str]:
        """The command line of a launcher that runs ``program`` inside."""

    @abstractmethod
    def agent(self, launch: Launch) -> list[str]:
        """The command line of the agent as seen from inside."""

    def missing(self) -> str:
        """What this machine lacks; empty if that shows in a trial only."""
        return ""

    def problem(self) -> str:
        """Why it cannot be used on this machine, by trial; empty if it can."""
        missing = self.missing()
        if missing:
            return missing
        gate, opener = os.pipe()
        os.write(opener, b"\n")
        os.close(opener)
        launch = Launch(SandboxSpec(), Path("/usr"), None, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), gate)
        try:
            program = self.command(
                launch, [python(), "-I", "-S", "-c", "import sys; sys.exit(sys.version_info < (3, 8))"]
            )
            result = subprocess.run(
                program,
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


class Bubblewrap(Cage):
    """Name spaces and a file system of its own, by ``bwrap``.

    The agent is process 1. Where this process is root, the agent has another user than ``bwrap``, which gives up its
    capabilities: its death cannot signal the agent, so the agent watches a pipe that ``bwrap`` holds open.
    """

    level: ClassVar[Isolation] = "bubblewrap"

    def __init__(self) -> None:
        self._options = ""

    def missing(self) -> str:
        program = shutil.which("bwrap")
        if program is None:
            return "bwrap is not installed: apt-get install bubblewrap"
        self._options = output([program, "--help"])
        lacking = [
            option
            for option in ("--size", "--perms", "--clearenv", "--as-pid-1", "--json-status-fd")
            if option not in self._options
        ]
        return f"{program} is too old: it lacks {', '.join(lacking)}" if lacking else ""

    def agent(self, launch: Launch) -> list[str]:
        reader, launch.lifeline = os.pipe()
        launch.fds += [reader, launch.lifeline]
        return command(MOUNT, python(), reader)

    def command(self, launch: Launch, program: list[str]) -> list[str]:
        told = [
            *self._user(launch.spec),
            "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--as-pid-1", "--hostname", "sandbox", "--die-with-parent", "--new-session",
            "--info-fd", str(launch.info), "--block-fd", str(launch.gate),
            *(("--json-status-fd", str(launch.lifeline)) if launch.lifeline >= 0 else ()),
            "--clearenv", *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
            *_words(launch, view(launch.spec, launch.directory, launch.group)), "--chdir", "/",
        ]  # fmt: skip
        # In a descriptor: the command line of process 1 can be read inside, and names paths of the host.
        arguments = launch.data(b"".join(os.fsencode(word) + b"\0" for word in told))
        return ["bwrap", "--args", str(arguments), "--", *_as_user(launch.spec), *_limited(launch), *program]

    def _user(self, spec: SandboxSpec) -> list[str]:
        """Who is inside: of a user name space, or, where this process is root, simply someone else."""
        if os.geteuid() == 0:
            rights = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # given up by `_as_user`
            return ["--cap-drop", "ALL", *(word for right in rights for word in ("--cap-add", right))]
        uid, gid = spec.user.split(":")
        words = ["--cap-drop", "ALL", "--unshare-user", "--uid", uid, "--gid", gid]
        return [*words, "--disable-userns"] if "--disable-userns" in self._options else words


class Namespaces(Cage):
    """The same by a script of our own, for machines without ``bwrap``."""

    level: ClassVar[Isolation] = "namespaces"

    def agent(self, launch: Launch) -> list[str]:
        return command(MOUNT, python())

    def command(self, launch: Launch, program: list[str]) -> list[str]:
        plan = {
            "info": launch.info,
            "gate": launch.gate,
            "user": [int(number) for number in launch.spec.user.split(":")],
            "files": [asdict(entry) for entry in view(launch.spec, launch.directory, launch.group)],
            "hidden": HIDDEN_PROC,
            "environment": ENVIRONMENT,
            "command": [*_limited(launch), *program],
        }
        script = namespaces.__file__
        return [sys.executable, "-I", "-S", script, str(launch.data(json.dumps(plan).encode()))]


class Rlimits(Cage):
    """Limits for each process and nothing else: the sandbox sees, and may do, what this user may."""

    level: ClassVar[Isolation] = "rlimits"

    def missing(self) -> str:
        return (
            ""
            if shutil.which("setpriv") and shutil.which("prlimit")
            else "setpriv and prlimit (util-linux) are missing"
        )

    def agent(self, launch: Launch) -> list[str]:
        return command(str(launch.directory), sys.executable)

    def command(self, launch: Launch, program: list[str]) -> list[str]:
        wait = [sys.executable, "-I", "-S", "-c", _WAIT, str(launch.info), str(launch.gate)]
        # The agent takes all that it started with it when it is told to end.
        return ["setpriv", "--pdeathsig", "TERM", "--no-new-privs", *wait, *_limited(launch), *program]


_WAIT = """\
import os, sys
info, gate = int(sys.argv[1]), int(sys.argv[2])
os.write(info, b'{"child-pid": %d}' % os.getpid())
os.close(info)
if not os.read(gate, 1):
    sys.exit(1)
os.close(gate)
os.execvp(sys.argv[3], sys.argv[3:])
"""

CAGES: dict[Isolation, type[Cage]] = {cage.level: cage for cage in (Bubblewrap, Namespaces, Rlimits)}


def unsupported(spec: SandboxSpec, level: Isolation) -> None:
    """Raise ``UnsupportedFeature`` for what a cage of this level cannot give."""
    asked = {
        f"runtime={spec.runtime}": spec.runtime is not None,
        "resources.gpus": spec.resources.gpus is not None,
        "cap_add": bool(spec.cap_add),
    }
    if level == "rlimits":
        myself = f"{os.geteuid()}:{os.getegid()}"
        asked |= {
            f"network={spec.network.mode} (only bridge: it has the host's)": spec.network.mode != "bridge",
            "readonly_root=True": spec.readonly_root,
            "mounts": bool(spec.mounts),
            f"user={spec.user} (only {myself}: who runs this)": spec.user != myself,
        }
    else:
        asked |= {
            "network=bridge": spec.network.mode == "bridge",
            "readonly_root=False": not spec.readonly_root,
            f"user={spec.user} (it would be root outside too)": os.geteuid() == 0 and spec.user.startswith("0:"),
        }
    refused = [name for name, wanted in asked.items() if wanted]
    if refused:
        raise UnsupportedFeature(
            f"local sandboxes (isolation {level}) cannot give {', '.join(refused)}; change it, or use docker"
        )
    docker_options.check(spec, (), os.cpu_count() or 1)


def _words(launch: Launch, entries: Iterable[Entry]) -> list[str]:
    """What bwrap is told about files."""
    made = {"/", "/usr", "/dev", "/proc", "/tmp"}
    words = []
    for entry in entries:
        # bwrap itself would make them for its own user alone.
        for parent in reversed(Path(entry.target).parents):
            if str(parent) not in made:
                made.add(str(parent))
                words += ["--perms", "0755", "--dir", str(parent)]
        words += _entry_words(launch, entry)
    return [*words, "--remount-ro", "/"]


def _entry_words(launch: Launch, entry: Entry) -> list[str]:
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


def _limited(launch: Launch) -> list[str]:
    """Words in front of a command that limit each process."""
    resources = launch.spec.resources
    limits = {"core": 0, "nofile": resources.nofile}
    if launch.group is None:
        # Of each process, and of each user in a user name space: the nearest that there is without control groups.
        limits |= {"as": resources.memory, "nproc": resources.pids}
    return ["prlimit", *(f"--{name}={value}:{value}" for name, value in limits.items()), "--"]


def _as_user(spec: SandboxSpec) -> list[str]:
    """Words in front of a command that give up root's rights; none for another user, who has none."""
    if os.geteuid() != 0:
        return []
    uid, gid = spec.user.split(":")
    return [
        "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all",
        "--no-new-privs", "--",
    ]  # fmt: skip
