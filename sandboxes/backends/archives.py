"""The tar files in which snapshots keep what a sandbox could write to.

Invariant: an archive is the sandbox's own word: it is stored and sent back into a sandbox, never unpacked here, and
cannot grow beyond a bound whatever the sandbox packs. It is whole or absent, and a name never becomes another path. Its
owner is written down beside it before it is made, and forgotten after it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentkit.errors import SandboxError
from agentkit.sandboxes import lease as leases
from agentkit.sandboxes import paths
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.sweep import DISCARDED
from agentkit.sandboxes.types import Observed, Snapshot

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,99}")
_OWNER = ".owner"
_PIECE = 1 << 18


class Packer(Protocol):
    """A channel that packs and unpacks directories."""

    def pack(self, paths: Sequence[str]) -> AsyncIterator[bytes]: ...

    async def unpack(self, paths: Sequence[str], archive: AsyncIterable[bytes]) -> None: ...


def path_of(name: str) -> Path:
    """Where the archive of snapshot ``name`` lies; not made. Raises ``ValueError`` for a name that could be a path."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of a snapshot: small letters, digits, and . _ - between them")
    return _folder() / f"{name}.tar"


def _owner_of(name: str) -> Path:
    return _folder() / f"{name}{_OWNER}"


def _write_owner(name: str, backend: str, labels: Mapping[str, str]) -> None:
    hidden = _folder() / f".{name}{_OWNER}.{secrets.token_hex(4)}"
    hidden.write_text(json.dumps({"backend": backend, "labels": dict(labels)}))
    os.replace(hidden, _owner_of(name))


def _folder() -> Path:
    folder = paths.runtime_root() / "snapshots"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def begin(backend: str, name: str) -> tuple[Path, Mapping[str, str]]:
    """Write down that this process owns snapshot ``name``, before anything of it is made.

    Returns:
        A name for the archive while it is written (``os.replace`` it by ``path_of(name)`` when it is whole), and the
        labels of the owner.

    Raises:
        SandboxError: there is a snapshot of that name.
    """
    archive = path_of(name)
    if archive.exists():
        raise SandboxError(f"there is a snapshot {name!r} already: discard it, or choose another name")
    labels = leases.current().labels(name)
    _write_owner(name, backend, labels)
    return archive.with_name(f".{archive.name}.{secrets.token_hex(4)}"), labels


def owned(backend: str) -> list[Observed]:
    """The snapshots of a back end that are written down here, with their owners' labels."""
    found = []
    for path in sorted(_folder().glob(f"*{_OWNER}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(path.read_text())
            if entry["backend"] == backend:
                found.append(Observed(path.name[: -len(_OWNER)], "exited", dict(entry["labels"])))
    return found


def give_up(backend: str, name: str) -> None:
    """Leave snapshot ``name``, of which something cannot be removed yet, to the reaper."""
    _write_owner(name, backend, {DISCARDED: "1"})


def discard(name: str) -> None:
    """Remove the archive of snapshot ``name`` and what is left of writing it; nothing there is fine."""
    archive = path_of(name)
    for left in archive.parent.glob(f".{archive.name}.*"):
        left.unlink(missing_ok=True)
    archive.unlink(missing_ok=True)


def forget(name: str) -> None:
    """Nothing of snapshot ``name`` is left."""
    _owner_of(name).unlink(missing_ok=True)


async def store(channel: Packer, spec: SandboxSpec, places: Sequence[str], target: Path) -> None:
    """Write the archive of directories ``places`` to the new file ``target``. Raises ``SandboxError`` if it grows
    beyond what a sandbox of this specification can hold."""
    # A sparse file is packed at its full length: the bound is what an honest tree can come to, with room for headers.
    bound = 2 * (spec.resources.tmp + spec.resources.workspace + spec.resources.shm) + (64 << 20)
    size = 0
    archive = channel.pack(places)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as out:  # noqa: ASYNC230
        try:
            async for piece in archive:
                size += len(piece)
                if size > bound:
                    raise SandboxError(
                        f"a snapshot of this sandbox is larger than {bound} bytes: does it hold sparse files?"
                    )
                out.write(piece)
                await asyncio.sleep(0)
        finally:
            if (aclose := getattr(archive, "aclose", None)) is not None:
                await finished(aclose())


async def put_back(channel: Packer, places: Sequence[str], snapshot: Snapshot) -> None:
    """Put what a snapshot holds in place of what is in ``places``; nothing if it holds nothing."""
    if snapshot.archive is None:
        return
    try:
        archive = open(snapshot.archive, "rb")  # noqa: ASYNC230, SIM115  (a local file; closed below)
    except OSError as error:
        raise SandboxError(f"snapshot {snapshot.id} cannot be read: {error}; was it discarded?") from error

    async def pieces() -> AsyncIterator[bytes]:
        while piece := archive.read(_PIECE):
            yield piece
            await asyncio.sleep(0)

    with archive:
        await channel.unpack(places, pieces())
