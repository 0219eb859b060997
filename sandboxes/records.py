"""What is written down of each sandbox before it is made: whose it is, where, and when its time ends.

Invariant: a record is there before anything else of its sandbox and goes after everything else, so that whatever a
killed owner leaves can be found by it. Each change happens under the record's own lock; a sandbox whose time has ended
(``expire`` said True) is never extended again, and one that was extended is not expired: exactly one of the two wins.
Deadlines are read from ``lease.now``, which stands still while the machine sleeps and never jumps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from agentkit.errors import LeaseExpired
from agentkit.sandboxes import paths
from agentkit.sandboxes.lease import Lease, now
from agentkit.sandboxes.owner import Owner, boot_id


@dataclass(frozen=True)
class Record:
    id: str
    backend: str
    owner: str
    run: str
    boot: str
    """The boot by whose clock ``deadline`` counts."""
    deadline: float | None
    """Seconds of ``lease.now``; None for no end."""
    ended: bool = False
    """The deadline has passed and the removal has begun."""

    @property
    def due(self) -> bool:
        """Whether its time has ended. Times of another boot say nothing: what they meant ended with it."""
        if self.ended:
            return True
        return self.deadline is not None and self.boot == boot_id() and now() >= self.deadline


def register(lease: Lease, id: str, backend: str, ttl: float | None) -> None:
    """Write down sandbox ``id`` of this process, before it is made."""
    deadline = None if ttl is None else now() + ttl
    record = Record(id, backend, str(lease.owner), lease.run, lease.owner.boot, deadline)
    path = paths.record_path(id)
    hidden = path.with_name(f".{id}.{os.getpid()}")
    try:
        hidden.write_text(_text(record))
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def extend(id: str, ttl: float | None) -> None:
    """Let sandbox ``id`` live for ``ttl`` seconds from now (None: without end), whoever owns it.

    Raises ``LeaseExpired`` if its time has ended already, or it is gone.
    """
    with _opened(id) as (fd, record):
        if record is None or record.due:
            raise LeaseExpired(f"sandbox {id} cannot be extended: its time to live has ended and it is being removed")
        deadline = None if ttl is None else now() + ttl
        _rewrite(fd, replace(record, deadline=deadline, boot=boot_id()))


def expire(id: str) -> bool:
    """Whether the time of sandbox ``id`` has ended; if so, nothing extends it any more."""
    with _opened(id) as (fd, record):
        if record is None or not record.due:
            return False
        if not record.ended:
            _rewrite(fd, replace(record, ended=True))
        return True


def read(id: str) -> Record | None:
    """None if there is none."""
    with _opened(id) as (_, record):
        return record


def forget(id: str) -> None:
    """Drop the record of a sandbox of which nothing is left; none there is fine."""
    with contextlib.suppress(FileNotFoundError):
        paths.record_path(id).unlink()


def all_of(run: str | None = None) -> list[Record]:
    """The records of one lease, or of all."""
    found = [read(id) for id in paths.recorded_ids()]
    return [record for record in found if record is not None and run in (None, record.run)]


def any_due() -> bool:
    """Whether the time of any sandbox has ended."""
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
    """None for what a crash left half written: the owner's lease alone decides then."""
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
