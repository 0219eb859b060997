"""Cache files: the index of games of a split, and translated games."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agentkit.atomic_file import write_atomically


def write_cached(path: Path, content: bytes) -> None:
    """Write a cache file atomically, readable for all users; do nothing if it cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=0o644, ignore_umask=True)
