"""The file system of a local sandbox, as a list of entries that any isolation can build.

Invariant: it contains programs, libraries and public settings of this host, read-only, the sandbox's own directory and
control group, and the mounts of its specification; no users, secrets, processes or devices of the host. Every writable
entry has a size limit.
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

from agentkit.sandboxes.backends.local.cgroup import Cgroup
from agentkit.sandboxes.paths import MOUNT
from agentkit.sandboxes.spec import SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8"}
HIDDEN_PROC = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list")
PROBE_TIMEOUT = 60.0
"""Seconds that a trial of a program may take."""

_PUBLIC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version",
    "default/locale", "fonts", "gai.conf", "host.conf", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "locale.alias", "locale.conf", "localtime", "magic", "mime.types", "nsswitch.conf", "os-release", "pki/tls/certs",
    "profile", "profile.d", "protocols", "rpc", "services", "shells", "skel", "ssl/certs", "ssl/openssl.cnf",
    "terminfo", "timezone", "vim",
)  # fmt: skip
"""Files of /etc that programs need and that contain nothing about users and secrets of this host."""
_IS_NEW = "import sys, select, _ctypes; print('new' if sys.version_info >= (3, 8) else 'old')"


@dataclass(frozen=True)
class FileEntry:
    """An entry of the file system, at ``target``."""

    kind: Literal["bind", "link", "text", "tmpfs", "proc", "devices"]
    target: str
    source: str = ""
    """The path on the host (``bind``), the target (``link``) or the content (``text``)."""
    read_only: bool = True
    size: int = 0
    """Bytes of the tmpfs; of ``devices``, of /dev/shm."""


def entries(spec: SandboxSpec, directory: Path, group: Cgroup | None) -> Iterator[FileEntry]:
    """Yield the entries of a sandbox, parents before their children; the root itself is read-only."""
    resources = spec.resources
    yield from _system()
    for name, content in _accounts(spec).items():
        yield FileEntry("text", f"/etc/{name}", content)
    yield FileEntry("proc", "/proc")
    yield FileEntry("devices", "/dev", size=_whole_page(resources.shm))
    yield FileEntry("tmpfs", "/tmp", size=_whole_page(resources.tmp))
    yield FileEntry("bind", MOUNT, str(directory))
    for controller, path in group.directories.items() if group is not None else ():
        yield FileEntry("bind", f"/sys/fs/cgroup/{controller}".rstrip("/"), path)
    yield FileEntry("tmpfs", spec.workdir, size=_whole_page(resources.workspace))
    for mount in spec.mounts:
        yield FileEntry("bind", mount.target, os.path.realpath(mount.source), read_only=mount.read_only)


@functools.cache
def python() -> str:
    """Return the interpreter for the agent: the system's, or else this process's (the sandbox then sees its files)."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        real = os.path.realpath(path)
        if real.startswith("/usr/") and os.path.exists(real) and "new" in output([path, "-I", "-S", "-c", _IS_NEW]):
            return path
    return os.path.realpath(sys.executable)


def output(argv: list[str]) -> str:
    """Return the output of a program; empty if it cannot be run in time."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _system() -> Iterator[FileEntry]:
    yield FileEntry("bind", "/usr", "/usr")
    for name in ("bin", "lib", "lib32", "lib64", "libx32", "sbin"):
        path = Path("/", name)
        if path.is_symlink():
            yield FileEntry("link", str(path), os.readlink(path))
        elif path.is_dir():
            yield FileEntry("bind", str(path), str(path))
    for name in _PUBLIC:
        if os.path.exists(f"/etc/{name}"):
            yield FileEntry("bind", f"/etc/{name}", os.path.realpath(f"/etc/{name}"))
    if not python().startswith("/usr/"):
        yield FileEntry("bind", sys.base_prefix, os.path.realpath(sys.base_prefix))


def _accounts(spec: SandboxSpec) -> dict[str, str]:
    """Return the content of the files of /etc that replace those of the host."""
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
    """Return the size of a tmpfs; 0 would mean no limit."""
    return max(size, 4096)
