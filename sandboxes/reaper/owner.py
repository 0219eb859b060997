"""Identity of an owner process, not confused with a later process of the same number.

Invariant: ``Owner.alive`` returns False only for a process that has certainly ended, True only for one that certainly
runs, and None if this machine and PID namespace cannot tell.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FORM = re.compile(r"([0-9a-f-]{36}):(\d{1,10}):(\d{1,20}):(\d{1,20})")
_PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """A process. ``str(owner)`` is the value of the label ``agentkit.owner``."""

    boot: str
    """The kernel's boot id: changes with every boot, and is the same in all containers of a machine."""
    pid: int
    start: int
    """Start time in clock ticks since the boot; distinguishes later processes with the same number."""
    namespace: int
    """The PID namespace of ``pid``."""

    def __str__(self) -> str:
        return f"{self.boot}:{self.pid}:{self.start}:{self.namespace}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """Parse the result of ``str``; return None for other text."""
        match = _FORM.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]), int(match[4]))

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """Return the running process ``pid``, or None."""
        start = start_of(pid)
        return cls(boot_id(), pid, start, _pid_namespace()) if isinstance(start, int) else None

    def alive(self) -> bool | None:
        """Return whether the process runs; None if this process cannot tell. A zombie does not run."""
        if (self.boot, self.namespace) != (boot_id(), _pid_namespace()):
            return None
        start = start_of(self.pid)
        return None if start == "hidden" else start == self.start


@functools.cache
def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def host_id() -> str:
    """Return a short name of this machine, unchanged by a reboot."""
    try:
        name = Path("/etc/machine-id").read_text().strip()
    except OSError:
        name = ""
    # A machine id may be copied with an image; together with the host name it is rarely shared.
    return hashlib.sha256(f"agentkit:{name}:{socket.gethostname()}".encode()).hexdigest()[:16]


@functools.cache
def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino


def start_of(pid: int) -> int | Literal["hidden"] | None:
    """Return the start time of process ``pid``; None if it does not exist; ``hidden`` if /proc does not show it."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        # With hidepid, /proc shows each user only their own processes.
        return "hidden" if _exists(pid) else None
    # The name, in parentheses, may contain spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # it ended and its number was reused between the two checks
