"""What a learner writes and reads: published weights, exports, and its part of a checkpoint.

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
from safetensors.torch import save_file
from torch import Tensor

from agentkit.errors import CheckpointError, RunDirectoryError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever way a library says that ``path`` cannot be written becomes ``RunDirectoryError``."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save says RuntimeError of a full disk
        raise RunDirectoryError(
            f"{path} cannot be written ({error}): make room, then continue from the last checkpoint with --resume"
        ) from error


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there.

    Raises ``RunDirectoryError`` when it cannot be written; what stood at ``path`` stays.
    """
    # Always the same name, and one writer of a path: what a kill leaves behind is overwritten by the next write.
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_weights(path: Path, state: dict[str, Tensor], version: int) -> None:
    """A safetensors file with the policy's version in its metadata."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    metadata = {"format": "pt", "version": str(version)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A nested dict of tensors and plain values."""
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def read_state(path: Path) -> dict[str, Any]:
    """What ``write_state`` wrote. Raises ``CheckpointError``; never runs code from the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or was made with fewer learner ranks")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older checkpoint") from error
