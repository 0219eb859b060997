"""Safe unpacking of untrusted archives.

Invariant: only plain files and folders are written, and only below the target: no links, devices, owners or special
modes. The limit applies to the bytes that are written, not to the sizes that the archive declares.
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
"""Maximum number of bytes that one archive may unpack to."""


def is_archive(path: Path) -> bool:
    """Return whether ``unpack`` can read the file ``path``."""
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def unpack(archive: Path, target: Path, *, limit: int = LIMIT) -> None:
    """Unpack a zip or tar archive, compressed or not.

    Args:
        archive: the file to unpack.
        target: folder for the content; created if needed.
        limit: maximum number of bytes to write.

    Raises:
        DataError: the archive is damaged or unpacks to more than ``limit`` bytes, or a member is a link or a device,
            or has an absolute path or ``..``.
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
    """Yield name and content of each member; the content of a folder is None."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for info in file.infolist():
                kind = info.external_attr >> 28  # the file type of Unix: 8 is a file, 4 a folder, 0 unknown
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
        raise DataError(f"{archive} holds {name!r}, a path outside the target; it is not unpacked")
    return Path(*path.parts)
