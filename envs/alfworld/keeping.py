"""Files that spare work: the index of a split, translated games.

Invariant: a file is whole or not there, and who may look into its folder may read it. What cannot be written costs time
later, never a game.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def keep(path: Path, content: bytes) -> None:
    """Write a file, or leave nothing behind."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
