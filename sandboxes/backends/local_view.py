"""What a local sandbox sees of this host, whoever puts it behind name spaces.

Invariant: programs, libraries and public settings, all read-only; the sandbox's own directory, its control group, and
what its specification mounts; nothing of this host's users, secrets, processes and devices. Everything that can be
written to is bounded in size.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentkit.sandboxes.backends.local_cgroup import Group
from agentkit.sandboxes.paths import MOUNT
from agentkit.sandboxes.spec import SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8"}
HIDDEN_PROC = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list")
PROBE_TIMEOUT = 60.0
"""Seconds that trying a program may take."""

_PUBLIC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version",
    "default/locale", "fonts", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "locale.alias", "locale.conf", "localtime", "magic", "mime.types", "nsswitch.conf", "os-release", "pki/tls/certs",
    "profile", "profile.d", "protocols", "rpc", "services", "shells", "skel", "ssl/certs", "ssl/openssl.cnf",
    "terminfo", "timezone", "vim",
)  # fmt: skip
"""What of /etc is shown: settings that programs need and that say nothing of this host's users and secrets."""
_IS_NEW = "import sys, select, _ctypes; print('new' if sys.version_info >= (3, 8) else 'old')"


@dataclass(frozen=True)
class Entry:
    """One thing that a sandbox sees, and where."""

    kind: Literal["bind", "link", "text", "tmpfs", "proc", "devices"]
    target: str
    source: str = ""
    """The host's path (``bind``), or the content (``link``, ``text``)."""
    read_only: bool = True
    size: int = 0
    """Bytes of a tmpfs; with ``devices``, of the one at /dev/shm."""


def view(spec: SandboxSpec, directory: Path, group: Group | None) -> Iterator[Entry]:
    """Everything that a sandbox sees, parents before what lies in them; the root itself is read-only."""
    resources = spec.resources
    yield from _system()
    for name, content in _accounts(spec).items():
        yield Entry("text", f"/etc/{name}", content)
    yield Entry("proc", "/proc")
    yield Entry("devices", "/dev", size=_whole_page(resources.shm))
    yield Entry("tmpfs", "/tmp", size=_whole_page(resources.tmp))
    yield Entry("bind", MOUNT, str(directory))
    for controller, path in group.directories.items() if group is not None else ():
        yield Entry("bind", f"/sys/fs/cgroup/{controller}".rstrip("/"), path)
    yield Entry("tmpfs", spec.workdir, size=_whole_page(resources.workspace))
    for mount in spec.mounts:
        yield Entry("bind", mount.target, os.path.realpath(mount.source), read_only=mount.read_only)


@functools.cache
def python() -> str:
    """The interpreter for the agent: the system's, else the one that runs this (its installation is shown inside)."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        real = os.path.realpath(path)
        if real.startswith("/usr/") and os.path.exists(real) and "new" in output([path, "-I", "-S", "-c", _IS_NEW]):
            return path
    return os.path.realpath(sys.executable)


def output(argv: list[str]) -> str:
    """What a program says; nothing if it cannot be run in time."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _system() -> Iterator[Entry]:
    yield Entry("bind", "/usr", "/usr")
    for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            yield Entry("link", str(path), os.readlink(path))
        elif path.is_dir():
            yield Entry("bind", str(path), str(path))
    for name in _PUBLIC:
        if os.path.exists(f"/etc/{name}"):
            yield Entry("bind", f"/etc/{name}", os.path.realpath(f"/etc/{name}"))
    if not python().startswith("/usr/"):
        yield Entry("bind", sys.base_prefix, os.path.realpath(sys.base_prefix))


def _accounts(spec: SandboxSpec) -> dict[str, str]:
    """Files of /etc that a sandbox gets instead of the host's."""
    uid, gid = spec.user.split(":")
    users, groups = {"0": "root", "65534": "nobody"}, {"0": "root", "65534": "nogroup"}
    users.setdefault(uid, "sandbox")
    groups.setdefault(gid, "sandbox")
    own = {uid: gid}
    return {
        "passwd": "".join(f"{name}:x:{id}:{own.get(id, id)}:{name}:/tmp:/bin/sh\n" for id, name in users.items()),
        "group": "".join(f"{name}:x:{id}:\n" for id, name in groups.items()),
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
    }


def _whole_page(size: int) -> int:
    """A tmpfs of size 0 would have no limit."""
    return max(size, 4096)
