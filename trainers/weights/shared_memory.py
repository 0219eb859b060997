"""Weights in memory that processes of one machine share.

Invariant: the memory has no name in any file system. It belongs to a descriptor of its owner (``memfd_create``), and
other processes open it as ``/proc/PID/fd/N``. So the kernel frees it when the owner releases it or ends in any way,
SIGKILL included, and the last reader has closed it. A random token tells it from what later has the same numbers.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentkit.errors import EngineError, LearnerError
from agentkit.trainers.weights.base import Bucket, Receiver, TensorSpec, Weights

_ALIGNMENT = 64
"""Tensors start at multiples of a cache line; types of torch need an aligned address."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The address of an owner's memory: its process, its descriptor there, and the token in its name."""

    pid: int
    descriptor: int
    token: str

    def open(self) -> int:
        """Return a descriptor for reading. Raises ``OSError`` if the owner has ended or released the memory."""
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if self.token in os.readlink(f"/proc/self/fd/{descriptor}"):
            return descriptor
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "the owner has released it")


@dataclass(frozen=True)
class SharedWeights(Weights):
    """Weights in a segment; ``offsets`` are those of ``tensors`` in it."""

    segment: Segment
    offsets: tuple[int, ...]

    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        """Yield all tensors at once, as views of the shared memory."""
        from agentkit.trainers.weights.tensors import tensor_of

        memory = self._map() if any(spec.nbytes for spec in self.tensors) else np.empty(0, np.uint8)
        yield [
            (spec.name, tensor_of(spec, memory[offset : offset + spec.nbytes]))
            for spec, offset in zip(self.tensors, self.offsets, strict=True)
        ]

    def plain(self) -> dict[str, Any]:
        """Return the object as lists, strings and numbers; ``of_plain`` reads it."""
        return {
            "version": self.version,
            "tensors": [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in self.tensors],
            "segment": [self.segment.pid, self.segment.descriptor, self.segment.token],
            "offsets": list(self.offsets),
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> SharedWeights:
        """Inverse of ``plain``."""
        tensors = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in plain["tensors"])
        return cls(plain["version"], tensors, Segment(*plain["segment"]), tuple(plain["offsets"]))

    def _map(self) -> NDArray[np.uint8]:
        try:
            descriptor = self.segment.open()
        except OSError as error:
            raise EngineError(
                f"the weights of version {self.version} are not in the memory of process {self.segment.pid} any more "
                f"({error.strerror}): publish them again, from a process of the same user on the same machine"
            ) from error
        try:
            return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(descriptor)


class SharedStaging:
    """Stages weights for engines on this machine. Implements ``Staging``."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def stage(self, version: int, buckets: Iterable[Bucket]) -> SharedWeights:
        self.release()  # first, so that there is never room for two versions needed
        try:
            return self._write(version, buckets)
        except OSError as error:
            self.release()
            raise LearnerError(
                f"the weights of version {version} cannot be staged in shared memory ({error}): make memory free"
            ) from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, version: int, buckets: Iterable[Bucket]) -> SharedWeights:
        from agentkit.trainers.weights.tensors import bytes_of, spec_of

        token = secrets.token_hex(8)
        descriptor = self._descriptor = os.memfd_create(f"agentkit-weights-{token}")
        tensors: list[TensorSpec] = []
        offsets: list[int] = []
        end = 0
        for bucket in buckets:
            for name, tensor in bucket:
                tensors.append(spec_of(name, tensor))
                offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
                end = offsets[-1] + _write_at(descriptor, bytes_of(tensor), offsets[-1])
        return SharedWeights(version, tuple(tensors), Segment(os.getpid(), descriptor, token), tuple(offsets))


def _write_at(descriptor: int, data: NDArray[np.uint8], offset: int) -> int:
    """Write all of ``data``; one system call writes 2 GiB at most."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:].data, offset + done)
    return done
