"""Files of a learner: exports, and its part of a checkpoint.

Invariant: a file appears under its name only when it is complete and on the disk (temporary name, fsync, rename).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there.

    Raises ``RunDirectoryError`` when it cannot be written; ``path`` then stays unchanged.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())


FILE_BYTES = 2**30
"""A file of ``write_tensors`` takes tensors up to this size, or one larger tensor."""


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], *, write: bool) -> None:
    """Write a stream of tensors to safetensors files; hold at most ``FILE_BYTES`` of them at once.

    Gathering the tensors may be a collective operation: ranks that do not ``write`` iterate as well.
    """
    number, size, held = 0, 0, {}

    def flush() -> None:
        replace_file(directory / f"{number:05d}.safetensors", lambda temporary: save_file(held, temporary))

    if write:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors:
        if not write:
            continue
        if held and size + tensor.nbytes > FILE_BYTES:
            flush()
            number, size, held = number + 1, 0, {}
        held[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if held:
        flush()


class TensorFiles:
    """The files of ``write_tensors``. Raises ``CheckpointError`` when they cannot be read."""

    def __init__(self, directory: Path):
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is missing: the checkpoint is incomplete")
        self._files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with _reading(path):
                file = safe_open(path, "pt")
                self._files |= dict.fromkeys(file.keys(), file)

    def specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of every tensor, in the order in which to read them."""
        slices = {name: file.get_slice(name) for name, file in self._files.items()}
        return [(name, _DTYPES[piece.get_dtype()], tuple(piece.get_shape())) for name, piece in slices.items()]

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64, "I64": torch.int64}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A nested dict of tensors and plain values."""
    replace_file(path, lambda temporary: torch.save(state, temporary))


def read_state(path: Path) -> dict[str, Any]:
    """Read a file of ``write_state``. Raises ``CheckpointError``; never runs code from the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
    with _reading(path):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from an older checkpoint") from error
