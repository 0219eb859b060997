"""Releases as trees of files, and the difference between two trees. Pure functions.

Invariant: a difference applies to the old tree with ``git apply`` and gives the text files of the new one. Files that a
text patch cannot contain (binary files, links, unusual names) are ignored.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentkit.errors import ConfigError

SIZE_LIMIT = 256 << 20
"""Bytes of an unpacked release."""
FILE_LIMIT = 20_000
"""Files of a release."""
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_TEST_MODULE = re.compile(r"test_.*\.py|.*_test\.py")
_CHANGELOG = re.compile(
    r"(?:docs?/)?(?:change[s]?|changelog|history|news|releases?|versions)(?:\.(?:rst|md|txt))?", re.I
)
_PLAIN = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")
"""Names that git does not quote."""


@dataclass(frozen=True)
class File:
    data: bytes
    executable: bool = False

    @property
    def text(self) -> str | None:
        """The content if it is text, otherwise None."""
        try:
            return None if b"\0" in self.data else self.data.decode("utf-8")
        except UnicodeDecodeError:
            return None


Tree = Mapping[str, File]
"""Path relative to the repository → file."""


def read(archive: Path) -> Tree:
    """Return the files of a source archive, without its top folder and without generated files of packaging tools.

    Raises:
        ConfigError: the archive is damaged, too large, or contains a path outside of itself.
    """
    tree: dict[str, File] = {}
    size = 0
    try:
        with tarfile.open(archive, "r:gz") as members:
            for member in members:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise ConfigError(f"{archive.name} holds the path {member.name!r}, which leads out of it")
                name = "/".join(path.parts[1:])
                if not member.isreg() or _is_generated(name):
                    continue
                size += member.size
                if size > SIZE_LIMIT or len(tree) >= FILE_LIMIT:
                    raise ConfigError(f"{archive.name} holds too much to be a task")
                content = members.extractfile(member)
                assert content is not None
                tree[name] = File(content.read(), bool(member.mode & 0o100))
    except (tarfile.TarError, OSError, EOFError) as problem:
        raise ConfigError(f"{archive} is not a source archive: {problem}") from problem
    if not tree:
        raise ConfigError(f"{archive} holds no files")
    return tree


def _is_generated(name: str) -> bool:
    return not name or name == "PKG-INFO" or ".egg-info/" in f"{name}/" or name.startswith(".git/")


def digest(tree: Tree) -> str:
    """Return a hash of names, modes and contents."""
    whole = hashlib.sha256()
    for name, file in sorted(tree.items()):
        whole.update(f"{name}\0{int(file.executable)}\0{len(file.data)}\0".encode())
        whole.update(file.data)
    return whole.hexdigest()


def is_test(path: str) -> bool:
    """Return whether a file belongs to the tests: it is in a folder of tests, or named like a test module."""
    *folders, name = path.split("/")
    return bool(_TEST_FOLDERS & set(folders)) or is_test_module(path) or name == "conftest.py"


def is_test_module(path: str) -> bool:
    """Return whether pytest would collect the file, by its name."""
    return _TEST_MODULE.fullmatch(path.rpartition("/")[2]) is not None


def test_folders(tree: Tree) -> list[str]:
    """Return the outermost folders of tests."""
    found = set()
    for path in tree:
        parts = path.split("/")[:-1]
        outermost = next((n for n, part in enumerate(parts) if part in _TEST_FOLDERS), None)
        if outermost is not None:
            found.add("/".join(parts[: outermost + 1]))
    return sorted(found)


def changed(old: Tree, new: Tree) -> list[str]:
    """Return the paths of text files with plain names that differ."""
    return [
        path
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
        and _PLAIN.fullmatch(path)
        and all(tree[path].text is not None for tree in (old, new) if path in tree)
    ]


def diff(old: Tree, new: Tree, wanted: Callable[[str], bool]) -> str:
    """Return the difference of the wanted paths in the format of ``git diff``."""
    return "".join(
        part for path in changed(old, new) if wanted(path) for part in _file_diff(path, old.get(path), new.get(path))
    )


def _file_diff(path: str, old: File | None, new: File | None) -> Iterator[str]:
    yield f"diff --git a/{path} b/{path}\n"
    modes = [f"100{'755' if file.executable else '644'}" if file else "" for file in (old, new)]
    if old is None:
        yield f"new file mode {modes[1]}\n"
    elif new is None:
        yield f"deleted file mode {modes[0]}\n"
    elif modes[0] != modes[1]:
        yield f"old mode {modes[0]}\nnew mode {modes[1]}\n"
    before, after = ([] if file is None else _lines(file.text or "") for file in (old, new))
    if not before and not after:  # for an added or removed empty file, git requires the hash of its content
        empty, zero = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", "0" * 40
        yield f"index {zero if old is None else empty}..{zero if new is None else empty}\n"
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    for line in difflib.unified_diff(before, after, *names):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    # Not splitlines, because git does not end a line at a form feed.
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def statement(old: Tree, new: Tree) -> str | None:
    """Return the part of the new release's change log that the old one lacks; None if there is no change log."""
    for path in sorted(new, key=len):
        if _CHANGELOG.fullmatch(path) and path in changed(old, new):
            before, after = (_lines((tree[path].text or "") if path in tree else "") for tree in (old, new))
            matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
            added = "".join(
                line for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal" for line in after[low:high]
            ).strip()
            if added:
                return added
    return None
