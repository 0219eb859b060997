"""Content of a weights file: check it against the served model and divide it into buckets.

Invariant: only headers are read, so a missing, broken, incomplete or mislabelled file is refused before any weight of a
serving model changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentkit.errors import EngineError

_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
"""Sizes of weight types; all other types of the format take one byte or less."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a weights file: its name as in the model's state dict, its shape, and its size in bytes."""

    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors of one weights file, in the file's order."""

    path: Path
    tensors: tuple[Tensor, ...]

    def check_fits(self, served: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``EngineError`` unless the file contains every tensor of ``served`` (name → shape) in its shape.

        Extra tensors are allowed: a state dict names tied weights twice, a checkpoint once.
        """
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        if missing := sorted(served.keys() - shapes.keys()):
            raise EngineError(
                f"the weights file {self.path} lacks {len(missing)} of the model's {len(served)} tensors, such as "
                f"{missing[0]}: publish the full state dict (adapters merged), with the names of the model's checkpoint"
            )
        for name, shape in served.items():
            if shapes[name] != shape:
                raise EngineError(f"{name} has shape {shapes[name]} in {self.path}, but {shape} in the served model")

    def buckets(self, limit: int) -> Iterator[list[str]]:
        """Yield the names in order, in lists of at most ``limit`` bytes each (one tensor at least)."""
        names: list[str] = []
        size = 0
        for tensor in self.tensors:
            if names and size + tensor.nbytes > limit:
                yield names
                names, size = [], 0
            names.append(tensor.name)
            size += tensor.nbytes
        if names:
            yield names


def read_manifest(path: Path, version: int) -> Manifest:
    """Read the header of the safetensors file ``path``, which will be served as policy ``version``.

    Raises ``EngineError`` if it cannot be read, has no tensors, or has another version.
    """
    try:
        tensors, metadata = _header(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"weights of version {version} cannot be read from {path} ({error}): publish a complete safetensors file, "
            "on a file system that the engine can read, before the update"
        ) from error
    if not tensors:
        raise EngineError(f"the weights file {path} of version {version} holds no tensors")
    claimed = metadata.get("version")
    if claimed is not None and claimed != str(version):
        raise EngineError(f"the weights file {path} has version {claimed}, not {version}")
    return Manifest(Path(path), tuple(tensors))


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name → shape of all tensors in a model directory's safetensors files; empty if none can be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            shapes |= {tensor.name: tensor.shape for tensor in _header(path)[0]}
        except (OSError, SafetensorError):
            return {}
    return shapes


def _header(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    tensors = []
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 (the handle is not a mapping)
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            tensors.append(Tensor(name, shape, prod(shape) * _DTYPE_BYTES.get(part.get_dtype(), 1)))
        return tensors, file.metadata() or {}
