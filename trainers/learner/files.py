"""Files of a learner: exports, and its part of a checkpoint.

Invariant: a file appears under its name only when it is complete and on the disk (temporary name, fsync, rename).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from agentkit.atomic_file import replacing
from agentkit.errors import CheckpointError, RunDirectoryError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert the errors of libraries that cannot write ``path`` to ``RunDirectoryError``."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        raise RunDirectoryError(
            f"{path} cannot be written ({error}): make room, then continue from the last checkpoint with --resume"
        ) from error


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there.

    Raises ``RunDirectoryError`` when it cannot be written; ``path`` then stays unchanged.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A nested dict of tensors and plain values."""
    _replace(path, lambda temporary: torch.save(state, temporary))


def read_state(path: Path) -> dict[str, Any]:
    """Read a file of ``write_state``. Raises ``CheckpointError``; never runs code from the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or was made with fewer learner ranks")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older checkpoint") from error
