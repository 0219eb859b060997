"""Records of sandboxes on disk: owner, back end, deadline.

Invariant: a record is written before its sandbox is created and deleted after it was removed, so that the reaper finds
what a killed owner leaves. Changes are made under the record's lock: an expired sandbox (``expire`` returned True)
cannot be extended, and an extended one is not expired. Deadlines use the clock of ``heartbeat.now``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from agentkit.atomic_file import write_atomically
from agentkit.errors import SandboxExpired
from agentkit.sandboxes import paths
from agentkit.sandboxes.reaper.heartbeat import OwnerHeartbeat, now
from agentkit.sandboxes.reaper.owner import Owner, boot_id


@dataclass(frozen=True)
class Record:
    """One sandbox."""

    id: str
    backend: str
    owner: str
    run: str
    boot: str
    """The boot that ``deadline`` refers to."""
    deadline: float | None
    """Seconds of ``heartbeat.now``; None: no time to live."""
    ended: bool = False
    """The deadline has passed and the removal has started."""
    server: str = ""
    """Name of the owner, if it is a sandbox server."""

    @property
    def due(self) -> bool:
        """Whether the deadline has passed. Deadlines of an earlier boot are ignored."""
        if self.ended:
            return True
        return self.deadline is not None and self.boot == boot_id() and now() >= self.deadline


def register(owner: OwnerHeartbeat, id: str, backend: str, ttl: float | None) -> None:
    """Write the record of sandbox ``id``, which ``owner`` is about to create."""
    deadline = None if ttl is None else now() + ttl
    record = Record(id, backend, str(owner.owner), owner.run, owner.owner.boot, deadline, server=owner.server)
    path = paths.record_path(id)
    write_atomically(path, _text(record))


def extend(id: str, ttl: float | None) -> None:
    """Set the time to live of sandbox ``id`` to ``ttl`` seconds from now; None: no end.

    Raises ``SandboxExpired`` if the deadline has passed, or the record does not exist.
    """
    with _opened(id) as (fd, record):
        if record is None or record.due:
            raise SandboxExpired(f"sandbox {id} cannot be extended: its time to live has ended and it is being removed")
        deadline = None if ttl is None else now() + ttl
        _rewrite(fd, replace(record, deadline=deadline, boot=boot_id()))


def expire(id: str) -> bool:
    """Return whether the deadline of sandbox ``id`` has passed; it can then no longer be extended."""
    with _opened(id) as (fd, record):
        if record is None or not record.due:
            return False
        if not record.ended:
            _rewrite(fd, replace(record, ended=True))
        return True


def read(id: str) -> Record | None:
    """Return the record of sandbox ``id``, or None."""
    with _opened(id) as (_, record):
        return record


def forget(id: str) -> None:
    """Delete the record of a sandbox that was removed, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        paths.record_path(id).unlink()


def all_of(run: str | None = None) -> list[Record]:
    """Return the records of owner ``run``, or all."""
    found = [read(id) for id in paths.recorded_ids()]
    return [record for record in found if record is not None and run in (None, record.run)]


def any_due() -> bool:
    """Return whether any deadline has passed."""
    with contextlib.suppress(OSError):
        return any(record.due for record in all_of())
    return False


@contextlib.contextmanager
def _opened(id: str) -> Iterator[tuple[int, Record | None]]:
    path = paths.record_path(id)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield -1, None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd, _parse(id, os.pread(fd, 4096, 0))
    finally:
        os.close(fd)


def _parse(id: str, text: bytes) -> Record | None:
    """Return None for a record that a crash left incomplete: the owner's heartbeat decides then."""
    try:
        record = Record(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return record if record.id == id and Owner.parse(record.owner) is not None else None


def _text(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"


def _rewrite(fd: int, record: Record) -> None:
    text = _text(record).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))
