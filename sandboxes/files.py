"""The files of a sandbox: read, written and copied, in both directions.

Invariant: what comes from a sandbox is data of somebody hostile. A download writes regular files below the path that
was asked for and nowhere else, whatever names and links the sandbox shows; sizes and numbers are bounded; links,
devices and pipes are never opened.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from agentkit.errors import FileTooLarge, PathError
from agentkit.sandboxes import calls
from agentkit.sandboxes.living import Living
from agentkit.sandboxes.types import FileInfo

READ_LIMIT = 64 << 20
"""Bytes that a file may have, unless the call says otherwise."""
COPY_LIMIT = 1 << 30
"""Bytes of a whole upload or download."""
ENTRY_LIMIT = 100_000
"""Files and directories of a whole upload or download."""
DEPTH_LIMIT = 256
"""Directories below each other in an upload or download."""


class Files:
    """``sandbox.files``. Paths that are not absolute are seen from the working directory.

    All methods raise like ``Sandbox.exec``, and ``PathError`` for what is missing, not permitted or of the wrong kind.
    """

    def __init__(self, sandbox: Living) -> None:
        self._sandbox = sandbox

    async def read(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """A regular file's content. Raises ``FileTooLarge`` beyond ``limit`` bytes."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.read(where, limit), "read")

    async def read_text(self, path: str, *, limit: int = READ_LIMIT) -> str:
        """The content as UTF-8; what is not is replaced."""
        return (await self.read(path, limit=limit)).decode("utf-8", "replace")

    async def write(self, path: str, data: str | bytes, *, mode: int = 0o644) -> None:
        """Replace or create a file, at once or not at all; parents are made. Raises ``DiskFull``."""
        where, content = self._path(path), data.encode() if isinstance(data, str) else bytes(data)
        await self._sandbox.call(lambda channel: channel.write(where, content, mode), "write")

    async def list(self, path: str = ".") -> Sequence[FileInfo]:
        """A directory's entries, by name."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.list(where), "list")

    async def stat(self, path: str) -> FileInfo | None:
        """What there is, links not followed; None if there is nothing."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.stat(where), "stat")

    async def exists(self, path: str) -> bool:
        return await self.stat(path) is not None

    async def remove(self, path: str) -> None:
        """Remove a file or a whole directory; nothing there is fine."""
        where = self._path(path)
        await self._sandbox.call(lambda channel: channel.remove(where), "remove")

    async def mkdir(self, path: str) -> None:
        """Make a directory and its parents; one there already is fine."""
        where = self._path(path)
        await self._sandbox.call(lambda channel: channel.mkdir(where), "mkdir")

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file, or a directory with all that is in it, from this machine; links are followed.

        Raises ``OSError`` for the source and, before anything is sent, ``FileTooLarge`` if there is too much of it:
        more than ``COPY_LIMIT`` bytes, ``ENTRY_LIMIT`` entries or ``DEPTH_LIMIT`` levels of directories.
        """
        copies = await asyncio.to_thread(_to_upload, Path(source))
        for part, file in copies:
            target = posixpath.join(path, part) if part else path
            if file is None:
                await self.mkdir(target)
                continue
            data, mode = await asyncio.to_thread(lambda file=file: (file.read_bytes(), file.stat().st_mode & 0o777))
            await self.write(target, data, mode=mode)

    async def download(self, path: str, target: str | os.PathLike[str], *, limit: int = COPY_LIMIT) -> Sequence[str]:
        """Copy a file, or a directory with all regular files in it, to this machine.

        A file at ``target`` is replaced; a directory must not be there yet. Returns the paths that were left out:
        links, devices, pipes. Raises ``OSError`` for the target and ``FileTooLarge`` beyond ``limit`` bytes in all,
        ``ENTRY_LIMIT`` entries or ``DEPTH_LIMIT`` levels of directories; nothing is written then if the sandbox shows
        it beforehand.
        """
        where = self._path(path)
        info = await self.stat(where)
        if info is None:
            raise PathError(f"there is no {where} in the sandbox", path=where)
        if info.kind == "file":
            data = await self.read(where, limit=min(limit, READ_LIMIT))
            await asyncio.to_thread(_replace, Path(target), data, info.mode)
            return []
        if info.kind != "directory":
            raise PathError(f"{where} is neither a file nor a directory ({info.kind})", path=where)
        return await _Download(self, where, Path(target), limit).run()

    def _path(self, path: str) -> str:
        return calls.path_in(self._sandbox.spec, path)


class _Download:
    """A directory on its way out."""

    def __init__(self, files: Files, source: str, target: Path, limit: int) -> None:
        self._files = files
        self._source = source
        self._target = target
        self._left = limit
        self._skipped: list[str] = []

    async def run(self) -> Sequence[str]:
        found = await self._walk()
        # mkdir of directories of our own: nothing in them can be a foreign link.
        await asyncio.to_thread(self._target.mkdir)
        for path, info in found:
            if info.kind == "directory":
                await asyncio.to_thread((self._target / path).mkdir)
            else:
                await self._file(info, self._target / path)
        return self._skipped

    async def _walk(self) -> list[tuple[PurePosixPath, FileInfo]]:
        """What to copy, by its path below the target, directories before what is in them. Raises ``FileTooLarge``."""
        found: list[tuple[PurePosixPath, FileInfo]] = []
        size = 0
        waiting = [(self._source, PurePosixPath())]
        while waiting:
            source, path = waiting.pop()
            if len(path.parts) >= DEPTH_LIMIT:
                raise FileTooLarge(f"{self._source} is more than {DEPTH_LIMIT} directories deep", path=self._source)
            for info in await self._files.list(source):
                name = posixpath.basename(info.path)
                if not _is_name(name) or info.path != posixpath.join(source, name):
                    raise PathError(
                        f"the sandbox shows an entry {info.path!r} in {source}, which cannot be", path=source
                    )
                if info.kind not in ("directory", "file"):
                    self._skipped.append(info.path)
                    continue
                found.append((path / name, info))
                if info.kind == "directory":
                    waiting.append((info.path, path / name))
                else:
                    size += info.size
            if len(found) + len(self._skipped) > ENTRY_LIMIT:
                raise FileTooLarge(f"{self._source} has more than {ENTRY_LIMIT} entries", path=self._source)
            if size > self._left:
                raise FileTooLarge(f"{self._source} has more than {self._left} bytes", path=self._source)
        return found

    async def _file(self, info: FileInfo, target: Path) -> None:
        # Its size is the sandbox's word: what counts is what comes.
        data = await self._files.read(info.path, limit=min(self._left, READ_LIMIT))
        self._left -= len(data)
        await asyncio.to_thread(_replace, target, data, info.mode)


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _replace(target: Path, data: bytes, mode: int) -> None:
    """Write beside it, then take its place: a link at ``target`` is replaced, never followed."""
    hidden = target.with_name(f".{secrets.token_hex(8)}.part")
    # Neither set-user-id nor writable by others, whatever the sandbox says.
    fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 | (mode & 0o755))
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(hidden, target)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def _to_upload(source: Path) -> list[tuple[str, Path | None]]:
    """What to copy: path below the source, and the file, or None for a directory. Raises ``FileTooLarge``."""
    if not source.is_dir():
        _check_size(source, [source])
        return [("", source)]
    found: list[tuple[str, Path | None]] = [("", None)]
    waiting = [(source, PurePosixPath())]
    while waiting:
        directory, below = waiting.pop()
        if len(below.parts) >= DEPTH_LIMIT:
            raise FileTooLarge(f"{source} is more than {DEPTH_LIMIT} directories deep")
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            path = below / entry.name
            found.append((path.as_posix(), None if entry.is_dir() else Path(entry)))
            if entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry), path))
        if len(found) > ENTRY_LIMIT:
            raise FileTooLarge(f"{source} has more than {ENTRY_LIMIT} entries")
    _check_size(source, [file for _, file in found if file is not None])
    return found


def _check_size(source: Path, files: Sequence[Path]) -> None:
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) > COPY_LIMIT or max(sizes, default=0) > READ_LIMIT:
        raise FileTooLarge(f"{source} has {sum(sizes)} bytes in {len(files)} files, which is too much for an upload")
