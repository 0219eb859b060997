"""Unpacks archives that nobody vouches for.

Invariant: nothing is written outside the target, and nothing but plain files and folders: no link, no device, no owner,
no special mode. What an archive claims to hold is never more than what may be written.
"""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from agentkit.errors import DataError

LIMIT = 64 << 30
"""Most bytes that one archive may unpack to."""


def is_archive(path: Path) -> bool:
    """Whether ``unpack`` can read it."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def unpack(archive: Path, target: Path, *, limit: int = LIMIT) -> None:
    """Unpack a zip or a tar, compressed or not, into ``target``.

    Raises ``DataError`` for a member with an absolute path, ``..``, a link, a device, or if it is damaged, or larger
    than ``limit`` bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        for name, stream in _members(archive):
            path = target / _safe(name, archive)
            if stream is None:
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with stream, path.open("xb") as out:
                while block := stream.read(1 << 20):
                    written += len(block)
                    if written > limit:
                        raise DataError(f"{archive} unpacks to more than {limit} bytes")
                    out.write(block)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        lzma.LZMAError,
        zlib.error,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}") from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of every member; None for a folder."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                kind = info.external_attr >> 28  # of Unix: 8 is a file, 4 a folder, 0 says nothing
                if kind not in (0, 4, 8):
                    raise DataError(f"{archive} holds {info.filename!r}, which is neither a file nor a folder")
                yield info.filename, None if info.is_dir() else file.open(info)
        return
    with tarfile.open(archive) as file:
        for member in file:
            if not member.isfile() and not member.isdir():
                raise DataError(f"{archive} holds {member.name!r}, which is neither a file nor a folder")
            yield member.name, file.extractfile(member) if member.isfile() else None


def _safe(name: str, archive: Path) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise DataError(f"{archive} holds {name!r}, which would be written elsewhere; it is not unpacked")
    return Path(*path.parts)
