"""Tar files that store the writable directories of a sandbox for a snapshot.

Invariant: the sandbox controls the content of an archive. It is stored and sent back into a sandbox, never unpacked
here, and its size is bounded. An archive is complete or absent, and its name never becomes another path. Its owner is
recorded beside it before it is created, and forgotten after it was removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from agentkit.atomic_file import write_atomically
from agentkit.errors import FileTooLarge, SandboxError
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent.channel import AgentChannel
from agentkit.sandboxes.reaper import heartbeat
from agentkit.sandboxes.reaper.labels import DISCARDED
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.types import Observed, Snapshot

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_OWNER = ".owner"
_PIECE = 1 << 18


def path_of(name: str) -> Path:
    """Return the path of the archive of snapshot ``name``. Raises ``ValueError`` for an invalid name."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a name of a snapshot; use lower-case letters, digits and . _ -")
    return _folder() / f"{name}.tar"


def _owner_of(name: str) -> Path:
    return _folder() / f"{name}{_OWNER}"


def _write_owner(name: str, backend: str, labels: Mapping[str, str]) -> None:
    write_atomically(_owner_of(name), json.dumps({"backend": backend, "labels": dict(labels)}))


def _folder() -> Path:
    folder = paths.runtime_root() / "snapshots"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def begin(backend: str, name: str) -> Mapping[str, str]:
    """Record this process as the owner of snapshot ``name``, and return the labels of the owner.

    Raises:
        SandboxError: there is a snapshot with this name.
    """
    if path_of(name).exists():
        raise SandboxError(f"snapshot {name!r} already exists; discard it, or choose another name")
    labels = heartbeat.current().labels(name)
    _write_owner(name, backend, labels)
    return labels


def owned(backend: str) -> list[Observed]:
    """Return the snapshots of a back end that are recorded here, with the labels of their owners."""
    found = []
    for path in sorted(_folder().glob(f"*{_OWNER}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(path.read_text())
            if entry["backend"] == backend:
                found.append(Observed(path.name[: -len(_OWNER)], "exited", dict(entry["labels"])))
    return found


def give_up(backend: str, name: str) -> None:
    """Leave snapshot ``name``, which cannot be removed yet, to the reaper."""
    _write_owner(name, backend, {DISCARDED: "1"})


def discard(name: str) -> None:
    """Remove the archive of snapshot ``name`` and its temporary files, if they exist."""
    archive = path_of(name)
    for left in archive.parent.glob(f".{archive.name}.*"):
        left.unlink(missing_ok=True)
    archive.unlink(missing_ok=True)


def forget(name: str) -> None:
    """Remove the record of the owner of snapshot ``name``."""
    _owner_of(name).unlink(missing_ok=True)


async def store(channel: AgentChannel, spec: SandboxSpec, directories: Sequence[str], name: str) -> Path:
    """Write the archive of ``directories`` for snapshot ``name`` and return its path.

    Raises:
        FileTooLarge: the archive is larger than the content that a sandbox of this specification can have.
    """
    # A sparse file is packed at its full length. The bound is the largest ordinary content, with room for headers.
    bound = 2 * (spec.resources.tmp + spec.resources.workspace + spec.resources.shm) + (64 << 20)
    size = 0
    target = path_of(name)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    archive = channel.pack(directories)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:  # noqa: ASYNC230
        try:
            async for piece in archive:
                size += len(piece)
                if size > bound:
                    raise FileTooLarge(f"the snapshot is larger than {bound} bytes; the sandbox may have sparse files")
                out.write(piece)
                await asyncio.sleep(0)
        finally:
            await finished(archive.aclose())
    os.replace(temporary, target)
    return target


async def restore(channel: AgentChannel, directories: Sequence[str], snapshot: Snapshot) -> None:
    """Replace the content of ``directories`` with that of a snapshot, if it has an archive."""
    if snapshot.archive is None:
        return
    try:
        archive = open(snapshot.archive, "rb")  # noqa: ASYNC230, SIM115  (a local file; closed below)
    except OSError as error:
        raise SandboxError(f"cannot read snapshot {snapshot.id}: {error}; it may have been discarded") from error

    async def pieces() -> AsyncIterator[bytes]:
        while piece := archive.read(_PIECE):
            yield piece
            await asyncio.sleep(0)

    with archive:
        await channel.unpack(directories, pieces())
