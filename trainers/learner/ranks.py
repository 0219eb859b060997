"""Data-parallel ranks over torch.distributed.

Invariant: gradients and metrics are *summed* over ranks, because every loss already has the denominators of the whole
step. With one rank a sum is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentkit.errors import AgentkitError, LearnerError

Result = TypeVar("Result")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up."""
BUCKET = 2**24
"""Elements that one reduction of gradients carries."""


class Ranks:
    """This rank in the process group. Raises ``LearnerError`` if the ranks do not meet."""

    def __init__(self, rank: int, size: int, init_method: str | None, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # collectives of objects use the current device
        if size == 1:
            return
        if init_method is None:
            raise LearnerError(f"{size} learner ranks need an init_method, such as tcp://127.0.0.1:PORT")
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, init_method, rank=rank, world_size=size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise LearnerError(
                f"learner rank {rank} of {size} did not meet the others at {init_method} ({error}): check that all "
                "ranks were started and that the address can be reached"
            ) from error

    def ensure_group(self) -> None:
        """Create a process group of one, until the process ends, for a library that needs one and keeps it."""
        if dist.is_initialized():
            return
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over ranks; one without a gradient counts as zero."""
        if self.size == 1:
            return
        for bucket in _buckets(parameters):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()

    def sum_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Sum the numbers of each name; every rank must pass the same names."""
        if self.size == 1:
            return sums
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Sum arrays of one shape; of parts that do not overlap, zero elsewhere, this is the exact union."""
        if self.size == 1:
            return array
        tensor = torch.from_numpy(array).to(self.device)
        dist.all_reduce(tensor)
        return tensor.cpu().numpy()

    def from_first(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` on rank 0; return its result, or raise its ``AgentkitError``, on every rank."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except AgentkitError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor; the others pass one of the same shape and type."""
        if self.size == 1:
            return tensor
        tensor = tensor.to(self.device)
        dist.broadcast(tensor, src=0)
        return tensor

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self.sum_metrics({"barrier": 0.0})

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket
