"""A buffer of the learner that engines on the same device read: CUDA IPC on a GPU, shared memory on CPUs.

Invariant: a handle consists of plain numbers and strings. Opening one can only map memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentkit.errors import EngineError
from agentkit.trainers.weights.base import TensorSpec
from agentkit.trainers.weights.shared_memory import Segment
from agentkit.trainers.weights.tensors import tensor_of

Handle = list[Any]


def place_of(device: str) -> str:
    """Name the memory of ``device``: equal for two processes that can share it, whatever index each gives it."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextlib.contextmanager
def own_buffer(size: int, device: str) -> Iterator[tuple[Tensor, Handle]]:
    """Yield ``size`` bytes on ``device`` (uint8) and their handle. They last as long as the context."""
    if device.startswith("cuda"):
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        yield flat, _cuda_handle(flat)
        torch.cuda.synchronize(device)
        return
    token = secrets.token_hex(8)
    descriptor = os.memfd_create(f"agentkit-buffer-{token}")
    try:
        os.ftruncate(descriptor, max(size, 1))
        memory = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
        yield torch.from_numpy(memory)[:size], [os.getpid(), descriptor, token, size]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(handle: Handle, device: str) -> Iterator[Tensor]:
    """Yield the bytes behind a handle; they must not be written to, nor used after the context."""
    if device.startswith("cuda"):
        flat = _of_cuda_handle(handle, torch.device(device))
        yield flat
        torch.cuda.synchronize(device)
        return
    pid, number, token, size = handle
    try:
        descriptor = Segment(pid, number, token).open()
    except OSError as error:
        raise EngineError(
            f"the learner's buffer in process {pid} cannot be read ({error.strerror}): engine.weights=ipc needs "
            "learner and engines of the same user on the same machine"
        ) from error
    try:
        memory = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(descriptor)
    yield tensor_of(TensorSpec("", "uint8", (size,)), memory[:size])


def _cuda_handle(flat: Tensor) -> Handle:
    from torch.multiprocessing.reductions import reduce_tensor

    arguments: Any = reduce_tensor(flat)[1]
    _, size, _, offset, _, _, _, memory, length, start, _, counter, counter_offset, event, synchronise = arguments
    return [size[0], offset, memory.hex(), length, start, counter.hex(), counter_offset, event.hex(), synchronise]


def _of_cuda_handle(handle: Handle, device: torch.device) -> Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    size, offset, memory, length, start, counter, counter_offset, event, synchronise = handle
    return rebuild_cuda_tensor(
        tensor_cls=Tensor,
        tensor_size=torch.Size([size]),
        tensor_stride=(1,),
        tensor_offset=offset,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=device.index or 0,  # the owner may number its GPUs differently
        storage_handle=bytes.fromhex(memory),
        storage_size_bytes=length,
        storage_offset_bytes=start,
        requires_grad=False,
        ref_counter_handle=bytes.fromhex(counter),
        ref_counter_offset=counter_offset,
        event_handle=bytes.fromhex(event),
        event_sync_required=synchronise,
    )
