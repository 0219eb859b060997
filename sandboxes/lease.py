"""The lease: how a process that owns sandboxes shows that it still lives.

Invariant: a lease is a file that its owner holds locked (``flock``) from before it can be seen until the owner ends,
however it ends; a thread renews it. Renewals are read from the clock that never jumps and stands still while the
machine sleeps, so that neither a changed wall clock nor a closed laptop makes a lease run out. A forked child has no
part in its parent's lease.
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
from agentkit.sandboxes.owner import Owner, host_id

RENEW_EVERY = 10.0
"""Seconds."""
RUNS_OUT_AFTER = 600.0
"""Seconds without a renewal after which an owner that still exists (stopped, wedged) loses its sandboxes."""

MANAGED = "agentkit.managed"
ID = "agentkit.id"
OWNER = "agentkit.owner"
RUN = "agentkit.run"
HOST = "agentkit.host"
CREATED = "agentkit.created"

LeaseState = Literal["held", "stale", "free", "absent"]
"""``stale``: locked but not renewed; ``free``: its owner has ended; ``absent``: no such file here."""


def now() -> float:
    """Seconds of the clock of leases and deadlines: the same in all processes of a machine, until it reboots."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Lease:
    """This process's lease; made by ``current``."""

    def __init__(self) -> None:
        owner = Owner.of(os.getpid())
        if owner is None:
            raise OSError("/proc does not show this process: mount it, sandboxes are told apart by it")
        self.owner = owner
        self.run = str(uuid.uuid4())
        self.path = paths.lease_path(self.run)
        self._fd, self._inode = self._make()
        threading.Thread(target=self._keep_renewing, name="agentkit-lease", daemon=True).start()

    def labels(self, id: str) -> Mapping[str, str]:
        """What marks sandbox ``id`` as this process's; the back end keeps it with the sandbox."""
        return {
            MANAGED: "1",
            ID: id,
            OWNER: str(self.owner),
            RUN: self.run,
            HOST: host_id(),
            CREATED: f"{time.time():.3f}",
        }

    def drop(self) -> None:
        """Close the descriptor alone, as a forked child must."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _make(self) -> tuple[int, int]:
        """Lock a file, then let it be seen: nobody ever meets it unlocked while its owner lives."""
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
            time.sleep(RENEW_EVERY)
            # A full disk or a directory that was cleared away must not end the renewals for good.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        if self._is_open():
            if os.fstat(self._fd).st_nlink:
                _stamp(self._fd)
                return
            os.close(self._fd)
        # Someone cleared the directory away, or closed all descriptors of this process (as daemons do).
        self._fd, self._inode = self._make()

    def _is_open(self) -> bool:
        """Whether the descriptor is still the lease's own."""
        try:
            return os.fstat(self._fd).st_ino == self._inode
        except OSError:
            return False


_current: Lease | None = None
_lock = threading.Lock()


def current() -> Lease:
    """The lease of this process, made when first asked for."""
    global _current
    with _lock:
        if _current is None or _current.path != paths.lease_path(_current.run):  # another runtime directory was set
            _current = Lease()
        return _current


def state(path: Path, run_out_after: float = RUNS_OUT_AFTER) -> LeaseState:
    """What the lease file at ``path`` says of its owner."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "absent"
    try:
        # Shared, so that two that look at once do not take each other for the owner.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "stale" if now() - os.fstat(fd).st_mtime > run_out_after else "held"
    else:
        return "free"
    finally:
        os.close(fd)


def _stamp(fd: int) -> None:
    # The file's time of change carries the steady clock, not the wall's.
    moment = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    os.utime(fd, ns=(moment, moment))


def _forget_in_child() -> None:
    global _current, _lock
    if _current is not None:
        _current.drop()
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
