"""Tensors as bytes, and back, without a copy on CPUs.

Invariant: a round trip gives the same type, shape and bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentkit.trainers.weights.base import TensorSpec


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Describe ``tensor``."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of ``tensor``: a view, or a copy if it is on a GPU or not contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(spec: TensorSpec, data: NDArray[np.uint8]) -> Tensor:
    """Return a tensor over ``data``, which may be read-only; it must not be written to."""
    whole = torch.from_numpy(np.asarray(_Writable(data)))
    return whole.view(getattr(torch, spec.dtype)).reshape(spec.shape)


class _Writable:
    """Presents a read-only array as a writable one: torch has no read-only tensors and warns about each such array."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data  # keeps the memory
        self.__array_interface__: dict[str, Any] = {
            **data.__array_interface__,
            "data": (data.__array_interface__["data"][0], False),
        }
