"""The interface of weights on their way from the learner to the engines.

Invariant: ``tensors`` describes exactly what ``buckets`` yields, in that order, so an engine can check an update before
it changes a weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from agentkit.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 512 << 20
"""Largest number of bytes that a learner gathers, and an engine holds besides its model, at a time."""

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in the model's state dict, its type as torch names it (``bfloat16``), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


Bucket: TypeAlias = "list[tuple[str, Tensor]]"
"""Some tensors with their names. An engine must not write to them."""


class Connection(Protocol):
    """What an engine keeps from one update to the next, such as a process group with the learner."""

    def close(self) -> None: ...


class Receiver:
    """An engine's end of updates: the device where tensors that need not pass the CPU arrive, and its connection."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.connection: Connection | None = None

    def close(self) -> None:
        """End the connection. Idempotent."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True)
class Weights(ABC):
    """All weights of one policy version, as the learner published them. Pickling it copies no weights."""

    version: int
    tensors: tuple[TensorSpec, ...]

    sent: ClassVar[bool] = False
    """Whether the learner sends them during each update, instead of keeping a copy of them for engines."""

    @abstractmethod
    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        """Yield the tensors in the order of ``tensors``. Blocks while it waits for bytes.

        Raises ``EngineError`` when the weights are no longer available; they must be published again.
        """

    def for_engines(self, number: int) -> Weights:
        """Return the weights for one update of ``number`` engines at a time."""
        return self


@dataclass(frozen=True)
class WeightsInPlace(Weights):
    """A version whose weights the engine shares with the learner: there is nothing to copy."""

    tensors: tuple[TensorSpec, ...] = ()

    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        return iter(())


class Staging(Protocol):
    """The learner's side: makes the weights of one version available to engines. Not thread-safe."""

    def stage(self, version: int, buckets: Iterable[Bucket]) -> Weights:
        """Copy the tensors and release the version staged before. Raises ``LearnerError`` when there is no room."""
        ...

    def release(self) -> None:
        """Free the staged weights. Idempotent."""
        ...


def check_fits(weights: Weights, served: dict[str, tuple[int, ...]]) -> None:
    """Raise ``EngineError`` unless ``weights`` has every tensor of ``served`` (name → shape) in its shape.

    Further tensors are allowed: a state dict may name tied weights twice.
    """
    shapes = {tensor.name: tensor.shape for tensor in weights.tensors}
    if missing := sorted(served.keys() - shapes.keys()):
        raise EngineError(
            f"the weights of version {weights.version} lack {len(missing)} of the model's {len(served)} tensors, such "
            f"as {missing[0]}: publish the full state dict (adapters merged), with the names of the model's checkpoint"
        )
    for name, shape in served.items():
        if shapes[name] != shape:
            raise EngineError(
                f"{name} has shape {shapes[name]} in the weights of version {weights.version}, but {shape} in the "
                "served model: learner and engine have different models"
            )
