"""The heartbeat of a process that owns sandboxes: a locked file, renewed by a thread.

Invariant: the file is locked (``flock``) from before it becomes visible until its owner ends, even by SIGKILL.
Renewals use the monotonic clock, which stands still while the machine sleeps: neither a changed wall clock nor a closed
laptop makes a heartbeat stale. A forked child does not share its parent's heartbeat.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from agentkit.sandboxes import paths
from agentkit.sandboxes.reaper.labels import CREATED, HOST, ID, MANAGED, OWNER, RUN
from agentkit.sandboxes.reaper.owner import Owner, host_id

RENEW_INTERVAL = 10.0
"""Seconds."""
STALE_AFTER = 600.0
"""Seconds without a renewal after which an owner that still exists (stopped, deadlocked) loses its sandboxes."""

HeartbeatState = Literal["held", "stale", "free", "absent"]
"""``held``: the owner runs; ``stale``: locked but not renewed; ``free``: the owner has ended; ``absent``: no file."""


def now() -> float:
    """Return the seconds of the clock of heartbeats and deadlines, which all processes share until the next boot."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class OwnerHeartbeat:
    """The heartbeat of this process; use ``current``."""

    def __init__(self) -> None:
        owner = Owner.of(os.getpid())
        if owner is None:
            raise OSError("/proc does not show this process; mount /proc, which identifies the owners of sandboxes")
        self.owner = owner
        self.run = str(uuid.uuid4())
        self.path = paths.heartbeat_path(self.run)
        self._fd, self._inode = self._make()
        threading.Thread(target=self._keep_renewing, name="agentkit-owner-heartbeat", daemon=True).start()

    def labels(self, id: str) -> Mapping[str, str]:
        """Return the labels that mark sandbox ``id`` as owned by this process."""
        return {
            MANAGED: "1",
            ID: id,
            OWNER: str(self.owner),
            RUN: self.run,
            HOST: host_id(),
            CREATED: f"{time.time():.3f}",
        }

    def drop(self) -> None:
        """Close the descriptor only, in a forked child: the lock is the parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _make(self) -> tuple[int, int]:
        """Lock a file under a hidden name, then rename it: it is never visible and unlocked while its owner lives."""
        hidden = self.path.with_name(f".{self.run}.{os.getpid()}")
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, f"{self.owner}\n".encode())
            _stamp(fd)
            os.replace(hidden, self.path)
            return fd, os.fstat(fd).st_ino
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                hidden.unlink()
            raise

    def _keep_renewing(self) -> None:
        while self._fd >= 0:
            time.sleep(RENEW_INTERVAL)
            # A full disk or a deleted directory must not end the renewals.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        if self._is_open():
            if os.fstat(self._fd).st_nlink:
                _stamp(self._fd)
                return
            os.close(self._fd)
        # The directory was deleted, or all descriptors of this process were closed (as daemons do).
        self._fd, self._inode = self._make()

    def _is_open(self) -> bool:
        """Return whether the descriptor still refers to the heartbeat file."""
        try:
            return os.fstat(self._fd).st_ino == self._inode
        except OSError:
            return False


_current: OwnerHeartbeat | None = None
_lock = threading.Lock()


def current() -> OwnerHeartbeat:
    """Return the heartbeat of this process; starts it on the first call."""
    global _current
    with _lock:
        if _current is None or _current.path != paths.heartbeat_path(_current.run):  # another runtime directory was set
            _current = OwnerHeartbeat()
        return _current


def state(path: Path, stale_after: float = STALE_AFTER) -> HeartbeatState:
    """Return the state of the heartbeat file at ``path``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "absent"
    try:
        # A shared lock: two readers must not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "stale" if now() - os.fstat(fd).st_mtime > stale_after else "held"
    else:
        return "free"
    finally:
        os.close(fd)


def _stamp(fd: int) -> None:
    # The modification time of the file holds the monotonic clock, not the wall clock.
    moment = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    os.utime(fd, ns=(moment, moment))


def _forget_in_child() -> None:
    global _current, _lock
    if _current is not None:
        _current.drop()
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
