"""Who owns a sandbox: one process of one boot of one machine, never mistaken for a later process of the same number.

Invariant: ``Owner.alive`` says False only of a process that has certainly ended, True only of one that certainly runs,
and None where it cannot be seen from here (another machine, another PID namespace).
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
    """``str(owner)`` is the value of the label ``agentkit.owner``."""

    boot: str
    """The kernel's boot id: another after every boot, the same in all containers of a machine."""
    pid: int
    start: int
    """When the process started, in clock ticks since the boot; tells it from others that got its number later."""
    namespace: int
    """The PID namespace in which ``pid`` counts."""

    def __str__(self) -> str:
        return f"{self.boot}:{self.pid}:{self.start}:{self.namespace}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """None for anything that ``str`` did not write."""
        match = _FORM.fullmatch(text)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]), int(match[4]))

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The running process ``pid``; None if there is none."""
        start = start_of(pid)
        return cls(boot_id(), pid, start, _pid_namespace()) if isinstance(start, int) else None

    def alive(self) -> bool | None:
        """Whether it runs; None if that cannot be seen from here. A zombie does not run."""
        if (self.boot, self.namespace) != (boot_id(), _pid_namespace()):
            return None
        start = start_of(self.pid)
        return None if start == "hidden" else start == self.start


@functools.cache
def boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def host_id() -> str:
    """Short name of this machine, the same after a reboot."""
    try:
        name = Path("/etc/machine-id").read_text().strip()
    except OSError:
        name = ""
    # A machine id alone may be part of an image; with the host name it rarely belongs to two machines.
    return hashlib.sha256(f"agentkit:{name}:{socket.gethostname()}".encode()).hexdigest()[:16]


@functools.cache
def _pid_namespace() -> int:
    return os.stat(_PROC / "self/ns/pid").st_ino


def start_of(pid: int) -> int | Literal["hidden"] | None:
    """When process ``pid`` started; None if there is none; ``hidden`` if it may not be looked at."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        # Where /proc shows each user only their own processes, this says nothing of another user's.
        return "hidden" if _exists(pid) else None
    # The name, in parentheses, may hold spaces and parentheses of its own.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # ended and its number given away between two looks: whoever has it now is another
