"""Atomic replacement of files.

A reader sees either the complete old content or the complete new content, even if the writer is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


def write_atomically(
    path: Path, data: bytes | str, *, mode: int = 0o666, ignore_umask: bool = False, durable: bool = False
) -> None:
    """Write ``data`` to a temporary file beside ``path`` and rename it to ``path``.

    A symbolic link at ``path`` is replaced, not followed.

    Args:
        path: the file to create or replace; its folder must exist.
        data: the whole content; text is encoded as UTF-8.
        mode: permission bits of the new file, reduced by the process's umask as in ``os.open``.
        ignore_umask: apply ``mode`` exactly.
        durable: flush the content to disk before the rename, so that it also survives a crash of the machine.

    Raises:
        OSError: the file cannot be written; ``path`` is unchanged and the temporary file is removed.
    """
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            if ignore_umask:
                os.fchmod(descriptor, mode)
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden temporary name beside ``path``; rename it to ``path`` when the block ends without an exception."""
    # A name may have up to 255 bytes, and a character up to four.
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
