"""The heartbeat of a process that owns sandboxes: a locked file, renewed by a thread.

Invariant: the file is locked (``flock``) from before it becomes visible until its owner ends, even by SIGKILL.
Renewals use the monotonic clock, which stands still while the machine sleeps: neither a changed wall clock nor a closed
laptop makes a heartbeat stale. A forked child does not share its parent's heartbeat.

All processes of a named owner (a sandbox server) use the same file, one after the other: when one has ended, the
sandboxes are kept for the next one for the number of seconds that the file states.
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
from agentkit.sandboxes.reaper.labels import CREATED, HOST, ID, MANAGED, OWNER, RUN, SERVER
from agentkit.sandboxes.reaper.owner import Owner, host_id

RENEW_INTERVAL = 10.0
"""Seconds."""
STALE_AFTER = 600.0
"""Seconds without a renewal after which an owner that still exists (stopped, deadlocked) loses its sandboxes."""

HeartbeatState = Literal["held", "stale", "kept", "free", "absent"]
"""``held``: the owner runs; ``stale``: locked but not renewed; ``kept``: the owner has ended and its sandboxes wait for
its successor; ``free``: the owner has ended; ``absent``: no file."""


def now() -> float:
    """Return the seconds of the clock of heartbeats and deadlines, which all processes share until the next boot."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def run_of(server: str) -> str:
    """Return the name of the heartbeat file of server ``server`` of this user."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"agentkit:{host_id()}:{paths.runtime_root()}:{server}"))


class OwnerHeartbeat:
    """The heartbeat of this process; use ``current``, or ``claim`` in a server.

    Args:
        server: name of a sandbox server, of which no other process runs; empty for other owners.
        keep: seconds for which the sandboxes of a server are kept after the end of this process.
    """

    def __init__(self, server: str = "", keep: float = 0.0) -> None:
        owner = Owner.of(os.getpid())
        if owner is None:
            raise OSError("/proc does not show this process; mount /proc, which identifies the owners of sandboxes")
        self.owner = owner
        self.server = server
        self.run = run_of(server) if server else str(uuid.uuid4())
        self.path = paths.heartbeat_path(self.run)
        self._keep = keep
        self._interval = min(RENEW_INTERVAL, keep / 10) if keep else RENEW_INTERVAL
        self._fd, self._inode = self._make()
        threading.Thread(target=self._keep_renewing, name="agentkit-owner-heartbeat", daemon=True).start()

    def labels(self, id: str) -> Mapping[str, str]:
        """Return the labels that mark sandbox ``id`` as owned by this process."""
        return {
            MANAGED: "1",
            ID: id,
            OWNER: str(self.owner),
            RUN: self.run,
            **({SERVER: self.server} if self.server else {}),
            HOST: host_id(),
            CREATED: f"{time.time():.3f}",
        }

    def renew(self) -> None:
        """Renew the heartbeat now. Raises ``OSError``."""
        if self._is_open():
            if os.fstat(self._fd).st_nlink:
                _stamp(self._fd)
                return
            os.close(self._fd)
        # The directory was deleted, or all descriptors of this process were closed (as daemons do).
        self._fd, self._inode = self._make()

    def give_up(self) -> None:
        """Let the sandboxes end with this process, without a successor. Raises ``OSError``."""
        self._keep = 0.0
        text = self._text()
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

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
            os.write(fd, self._text())
            _stamp(fd)
            os.replace(hidden, self.path)
            return fd, os.fstat(fd).st_ino
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                hidden.unlink()
            raise

    def _text(self) -> bytes:
        return f"{self.owner}\n{self._keep:g}\n".encode()

    def _keep_renewing(self) -> None:
        while self._fd >= 0:
            time.sleep(self._interval)
            # A full disk or a deleted directory must not end the renewals.
            with contextlib.suppress(OSError):
                self.renew()

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


def claim(server: str, keep: float) -> OwnerHeartbeat:
    """Make this process the owner ``server``, before it creates sandboxes. The caller excludes a second process."""
    global _current
    with _lock:
        _current = OwnerHeartbeat(server, keep)
        return _current


def release(*, keep: bool) -> None:
    """End the heartbeat of this process. ``keep``: a server's sandboxes wait for its successor from now on."""
    global _current
    with _lock:
        ending, _current = _current, None
    if ending is not None:
        try:
            ending.renew() if keep else ending.give_up()
        finally:
            ending.drop()


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
        return "kept" if 0 <= now() - os.fstat(fd).st_mtime < _keep_of(os.pread(fd, 4096, 0)) else "free"
    finally:
        os.close(fd)


def _keep_of(text: bytes) -> float:
    try:
        return float(text.split(b"\n")[1])
    except (IndexError, ValueError):
        return 0.0


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
