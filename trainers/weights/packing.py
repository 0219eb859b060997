"""A bucket of tensors as one flat array of bytes, and back, on any device.

Invariant: both ends compute the same layout from the tensors' descriptions alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentkit.trainers.weights.base import Bucket, TensorSpec

ALIGNMENT = 64
"""Tensors start at multiples of it; types of torch need an aligned address."""


def offsets(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return where each tensor starts, and the number of bytes of all (at least 1)."""
    starts: list[int] = []
    end = 0
    for spec in specs:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + spec.nbytes
    return starts, max(end, 1)


def pack(bucket: Bucket, specs: Sequence[TensorSpec], flat: Tensor) -> None:
    """Copy the tensors of ``bucket``, which ``specs`` describe, into ``flat`` (uint8)."""
    for (_, tensor), (_, part) in zip(bucket, unpack(flat, specs), strict=True):
        part.copy_(tensor)


def unpack(flat: Tensor, specs: Sequence[TensorSpec]) -> Bucket:
    """Return the tensors in ``flat``, as views."""
    starts, _ = offsets(specs)
    return [(spec.name, _part(flat, spec, start)) for spec, start in zip(specs, starts, strict=True)]


def _part(flat: Tensor, spec: TensorSpec, start: int) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype, device=flat.device)
    return flat[start : start + spec.nbytes].view(dtype).reshape(spec.shape)
