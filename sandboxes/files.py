"""Read, write and copy the files of a sandbox.

Invariant: data from a sandbox is untrusted. A download writes regular files below its target only, independent of names
and links in the sandbox; sizes and counts are bounded; links, devices and pipes are not opened.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from agentkit.atomic_file import write_atomically
from agentkit.errors import FileTooLarge, PathError
from agentkit.sandboxes import commands
from agentkit.sandboxes.threads import in_thread
from agentkit.sandboxes.types import FileInfo

if TYPE_CHECKING:
    from agentkit.sandboxes.sandbox import Sandbox

READ_LIMIT = 64 << 20
"""Default limit of a file in bytes."""
COPY_LIMIT = 1 << 30
"""Bytes of an upload or download."""
ENTRY_LIMIT = 100_000
"""Files and directories of an upload or download."""
DEPTH_LIMIT = 256
"""Nested directories of an upload or download."""


class Files:
    """Files of a sandbox: ``box.files``. Relative paths start at the working directory.

    All methods raise ``PathError`` for a file that is missing, not permitted or of the wrong kind, and ``SandboxLost``,
    ``SandboxExpired`` and ``InvalidTransition`` like ``Sandbox.exec``.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def read(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Return the content of a regular file. Raises ``FileTooLarge`` beyond ``limit`` bytes."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.read(where, limit), "read")

    async def read_text(self, path: str, *, limit: int = READ_LIMIT) -> str:
        """Return the content as text; invalid UTF-8 is replaced."""
        return (await self.read(path, limit=limit)).decode("utf-8", "replace")

    async def write(self, path: str, data: str | bytes, *, mode: int = 0o644) -> None:
        """Create or replace a file atomically; creates parent directories. Raises ``DiskFull``."""
        where, content = self._path(path), data.encode() if isinstance(data, str) else bytes(data)
        await self._sandbox.call(lambda channel: channel.write(where, content, mode), "write")

    async def list(self, path: str = ".") -> Sequence[FileInfo]:
        """Return the entries of a directory, sorted by name."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.list(where), "list")

    async def stat(self, path: str) -> FileInfo | None:
        """Return the entry at ``path`` without following links, or None."""
        where = self._path(path)
        return await self._sandbox.call(lambda channel: channel.stat(where), "stat")

    async def exists(self, path: str) -> bool:
        """Return whether ``path`` exists, without following links."""
        return await self.stat(path) is not None

    async def remove(self, path: str) -> None:
        """Remove a file or a directory with its content, if it exists."""
        where = self._path(path)
        await self._sandbox.call(lambda channel: channel.remove(where), "remove")

    async def mkdir(self, path: str) -> None:
        """Create a directory and its parents, if necessary."""
        where = self._path(path)
        await self._sandbox.call(lambda channel: channel.mkdir(where), "mkdir")

    async def upload(self, source: str | os.PathLike[str], path: str) -> None:
        """Copy a file or a directory from this machine; links are followed.

        Raises:
            OSError: the source cannot be read.
            FileTooLarge: more than ``COPY_LIMIT`` bytes, ``ENTRY_LIMIT`` entries or ``DEPTH_LIMIT`` levels; nothing is
                sent then.
        """
        copies = await in_thread(_to_upload, Path(source))
        for part, file in copies:
            target = posixpath.join(path, part) if part else path
            if file is None:
                await self.mkdir(target)
                continue
            data, mode = await in_thread(lambda file=file: (file.read_bytes(), file.stat().st_mode & 0o777))
            await self.write(target, data, mode=mode)

    async def download(self, path: str, target: str | os.PathLike[str], *, limit: int = COPY_LIMIT) -> Sequence[str]:
        """Copy a file, or a directory with its regular files, to this machine.

        Args:
            path: source in the sandbox.
            target: replaced if it is a file; a directory must not exist yet.
            limit: bytes in total.

        Returns:
            The paths that were skipped: links, devices, pipes.

        Raises:
            OSError: the target cannot be written.
            FileTooLarge: more than ``limit`` bytes, ``ENTRY_LIMIT`` entries or ``DEPTH_LIMIT`` levels.
        """
        where = self._path(path)
        info = await self.stat(where)
        if info is None:
            raise PathError(f"{where} does not exist in the sandbox", path=where)
        if info.kind == "file":
            data = await self.read(where, limit=min(limit, READ_LIMIT))
            await in_thread(_write, Path(target), data, info.mode)
            return []
        if info.kind != "directory":
            raise PathError(f"{where} is neither a file nor a directory ({info.kind})", path=where)
        return await _Download(self, where, Path(target), limit).run()

    def _path(self, path: str) -> str:
        return commands.path_in(self._sandbox.spec, path)


class _Download:
    """The download of one directory."""

    def __init__(self, files: Files, source: str, target: Path, limit: int) -> None:
        self._files = files
        self._source = source
        self._target = target
        self._left = limit
        self._skipped: list[str] = []

    async def run(self) -> Sequence[str]:
        found = await self._walk()
        # New directories of this user: they contain no links of others.
        await in_thread(self._target.mkdir)
        for path, info in found:
            if info.kind == "directory":
                await in_thread((self._target / path).mkdir)
            else:
                await self._file(info, self._target / path)
        return self._skipped

    async def _walk(self) -> list[tuple[PurePosixPath, FileInfo]]:
        """Return the entries to copy, with paths below the target, parents first. Raises ``FileTooLarge``."""
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
                    raise PathError(f"the sandbox lists an impossible entry {info.path!r} in {source}", path=source)
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
        # The listed size is untrusted: the received bytes count.
        data = await self._files.read(info.path, limit=min(self._left, READ_LIMIT))
        self._left -= len(data)
        await in_thread(_write, target, data, info.mode)


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _write(target: Path, data: bytes, mode: int) -> None:
    # The mode comes from the sandbox: never set-user-id, never writable by others.
    write_atomically(target, data, mode=0o600 | (mode & 0o755))


def _to_upload(source: Path) -> list[tuple[str, Path | None]]:
    """Return paths below the source, each with its file, or None for a directory. Raises ``FileTooLarge``."""
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
        raise FileTooLarge(f"{source} has {sum(sizes)} bytes in {len(files)} files: too large for an upload")
