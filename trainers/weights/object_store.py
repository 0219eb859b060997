"""Weights in Ray's object store: for engines on any node, with one copy on each.

Invariant: the bytes go from the learner's process into the store, and from an engine's node's store into its model;
other processes handle references only. The objects live as long as references to them and the learner's process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from agentkit.errors import EngineError, LearnerError
from agentkit.trainers.weights.base import Bucket, Receiver, TensorSpec, Weights

ARRIVAL_S = 300.0
"""Seconds for a bucket to arrive from another node."""


@dataclass(frozen=True)
class StoredWeights(Weights):
    """Weights as one object per bucket, each a list of the tensors' bytes."""

    references: tuple[Any, ...]
    """Not arguments of a Ray call themselves, so Ray passes them on without fetching the objects."""

    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        """Yield views of this node's object store; while one is used, the next ones arrive."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        from agentkit.trainers.weights.tensors import tensor_of

        specs = iter(self.tensors)
        if self.references:
            ray.wait(list(self.references), num_returns=len(self.references), timeout=0, fetch_local=True)
        for reference in self.references:
            try:
                arrays = ray.get(reference, timeout=ARRIVAL_S)
            except GetTimeoutError as error:
                raise EngineError(
                    f"weights of version {self.version} did not arrive within {ARRIVAL_S:.0f} s: check the network "
                    "between the learner's node and this one, and the memory of their object stores"
                ) from error
            except RayError as error:
                raise EngineError(
                    f"the weights of version {self.version} are not in the object store any more "
                    f"({type(error).__name__}): publish them again"
                ) from error
            of_bucket = itertools.islice(specs, len(arrays))
            yield [(spec.name, tensor_of(spec, array)) for spec, array in zip(of_bucket, arrays, strict=True)]


class StoredStaging:
    """Stages weights for engines on any node of a Ray cluster. Implements ``Staging``."""

    def __init__(self) -> None:
        self._references: list[Any] = []

    def stage(self, version: int, buckets: Iterable[Bucket]) -> StoredWeights:
        import ray
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError

        from agentkit.trainers.weights.tensors import bytes_of, spec_of

        self.release()
        tensors: list[TensorSpec] = []
        try:
            for bucket in buckets:
                tensors += [spec_of(name, tensor) for name, tensor in bucket]
                self._references.append(ray.put([bytes_of(tensor) for _, tensor in bucket]))
        except (ObjectStoreFullError, OutOfDiskError) as error:
            self.release()
            raise LearnerError(
                f"the object store has no room for the weights of version {version} ({error}): start Ray with more "
                "object_store_memory on the learner's node"
            ) from error
        except BaseException:
            self.release()
            raise
        return StoredWeights(version, tuple(tensors), tuple(self._references))

    def release(self) -> None:
        self._references = []
