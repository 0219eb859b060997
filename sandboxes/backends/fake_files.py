"""A file system in memory: enough of one that programs and callers cannot tell it from a small Linux.

Invariant: paths are absolute and normalised before they are looked up; nothing is written outside the writable mounts,
and a mount never holds more than its size.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["file", "directory", "symlink", "other"]
_MAX_LINKS = 16


def failure(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)


@dataclass
class Node:
    """One entry: its bytes, or where it leads to, or nothing."""

    kind: Kind
    mode: int = 0o644
    data: bytearray = field(default_factory=bytearray)
    target: str = ""
    modified: float = 0.0

    def copy(self) -> Node:
        return replace(self, data=bytearray(self.data))


class FakeFiles:
    """All files of one machine. Methods raise ``OSError`` with the code that Linux would give.

    ``mounts`` maps the writable directories to their size in bytes; everything else is read-only unless
    ``writable_root``.
    """

    def __init__(self, mounts: dict[str, int], clock: Callable[[], float], writable_root: bool = False) -> None:
        self.mounts = mounts
        self._clock = clock
        self._writable_root = writable_root
        self._nodes: dict[str, Node] = {"/": Node("directory", 0o755)}
        for path in ("/bin", "/dev", "/etc", "/proc", "/root", "/usr/bin", "/var/tmp"):
            self._make_parents(path + "/.")
        self._nodes["/etc/passwd"] = Node("file", data=bytearray(b"root:x:0:0::/root:/bin/sh\n"))
        for device in ("/dev/null", "/dev/zero"):
            self._nodes[device] = Node("other", 0o666)
        for mount in mounts:
            self._make_parents(mount + "/.")

    def resolve(self, path: str, follow_last: bool = True) -> str:
        """The normalised path after all symbolic links."""
        for _ in range(_MAX_LINKS):
            walked = "/"
            parts = [part for part in posixpath.normpath("/" + path).split("/") if part]
            for index, part in enumerate(parts):
                walked = posixpath.join(walked, part)
                node = self._nodes.get(walked)
                if node and node.kind == "symlink" and (follow_last or index < len(parts) - 1):
                    path = posixpath.join(posixpath.dirname(walked), node.target, *parts[index + 1 :])
                    break
            else:
                return walked
        raise failure(errno.ELOOP, path)

    def get(self, path: str, follow: bool = True) -> Node:
        resolved = self.resolve(path, follow)
        node = self._nodes.get(resolved)
        if node is None:
            raise failure(self._why_missing(resolved), path)
        return node

    def find(self, path: str, follow: bool = True) -> Node | None:
        try:
            return self.get(path, follow)
        except OSError:
            return None

    def read(self, path: str) -> bytes:
        node = self.get(path)
        if node.kind == "directory":
            raise failure(errno.EISDIR, path)
        return bytes(node.data)

    def write(self, path: str, data: bytes, mode: int | None = None, append: bool = False) -> None:
        resolved = self.resolve(path)
        node = self._nodes.get(resolved)
        if node and node.kind == "other":
            return
        if node and node.kind == "directory":
            raise failure(errno.EISDIR, path)
        self._check_parent(resolved)
        self._check_writable(resolved)
        before = len(node.data) if node else 0
        after = before + len(data) if append else len(data)
        mount = self._mount(resolved)
        if mount and after > before and self.used(mount) - before + after > self.mounts[mount]:
            raise failure(errno.ENOSPC, path)
        if node is None:
            node = self._nodes[resolved] = Node("file")
        if not append:
            node.data.clear()
        node.data += data
        node.mode = node.mode if mode is None else mode
        node.modified = self._clock()

    def make(self, path: str, node: Node) -> None:
        """Put an entry where there is none."""
        resolved = self.resolve(path, follow_last=False)
        if resolved in self._nodes:
            raise failure(errno.EEXIST, path)
        self._check_parent(resolved)
        self._check_writable(resolved)
        node.modified = self._clock()
        self._nodes[resolved] = node

    def mkdir(self, path: str) -> None:
        """Make a directory and its parents."""
        resolved = self.resolve(path)
        node = self._nodes.get(resolved)
        if node and node.kind != "directory":
            raise failure(errno.EEXIST, path)
        if node is None:
            if resolved != "/":
                self.mkdir(posixpath.dirname(resolved))
            self._check_writable(resolved)
            self._nodes[resolved] = Node("directory", 0o755, modified=self._clock())

    def remove(self, path: str) -> None:
        """Remove a whole tree."""
        resolved = self.resolve(path, follow_last=False)
        if resolved not in self._nodes:
            raise failure(errno.ENOENT, path)
        self._check_writable(resolved)
        if resolved in self.mounts:
            raise failure(errno.EBUSY, path)
        for entry in [entry for entry in self._nodes if entry == resolved or entry.startswith(resolved + "/")]:
            del self._nodes[entry]

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted."""
        if self.get(path).kind != "directory":
            raise failure(errno.ENOTDIR, path)
        resolved = self.resolve(path)
        start = resolved if resolved.endswith("/") else resolved + "/"
        return sorted(
            entry[len(start) :]
            for entry in self._nodes
            if entry.startswith(start) and entry != "/" and "/" not in entry[len(start) :]
        )

    def used(self, mount: str) -> int:
        """Bytes in a mount."""
        return sum(len(node.data) for path, node in self._nodes.items() if path.startswith(mount + "/"))

    def empty_mounts(self) -> None:
        for mount in self.mounts:
            for path in [path for path in self._nodes if path.startswith(mount + "/")]:
                del self._nodes[path]

    def export(self, mounts: bool) -> dict[str, Node]:
        """A copy of what is in the mounts, or of everything else."""
        return {path: node.copy() for path, node in self._nodes.items() if (self._mount(path) is not None) == mounts}

    def load(self, nodes: dict[str, Node]) -> None:
        """Add copies of exported entries."""
        self._nodes.update({path: node.copy() for path, node in nodes.items()})

    def _make_parents(self, path: str) -> None:
        parent = posixpath.dirname(path)
        if parent not in self._nodes:
            self._make_parents(parent)
            self._nodes[parent] = Node("directory", 0o755)

    def _mount(self, path: str) -> str | None:
        return next((mount for mount in self.mounts if path == mount or path.startswith(mount + "/")), None)

    def _why_missing(self, resolved: str) -> int:
        parent = resolved
        while parent != "/":
            parent = posixpath.dirname(parent)
            node = self._nodes.get(parent)
            if node is not None:
                return errno.ENOENT if node.kind == "directory" else errno.ENOTDIR
        return errno.ENOENT

    def _check_parent(self, resolved: str) -> None:
        node = self._nodes.get(posixpath.dirname(resolved))
        if node is None or node.kind != "directory":
            raise failure(self._why_missing(resolved), resolved)

    def _check_writable(self, resolved: str) -> None:
        if self._mount(resolved) is None and not self._writable_root:
            raise failure(errno.EROFS, resolved)
