"""The learner's end of weights that are sent while engines update: no copy of the model is kept.

Invariant: the ranks of the learner gather equally often, whatever happens to receivers. No more than one bucket is held
besides the gathered one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from agentkit.errors import LearnerError
from agentkit.trainers.weights.base import Bucket, TensorSpec
from agentkit.trainers.weights.broadcast import BROADCAST_S, Group
from agentkit.trainers.weights.buffer import own_buffer, place_of
from agentkit.trainers.weights.packing import offsets, pack
from agentkit.trainers.weights.rendezvous import (
    ARRIVE_S,
    ATTEMPTS,
    CONNECT_S,
    REJOIN_S,
    Attempt,
    Interrupted,
    Plan,
    host_store,
    reach_store,
)
from agentkit.trainers.weights.sent import SentWeights, Wire
from agentkit.trainers.weights.tensors import spec_of

_Put = Callable[[int, list[TensorSpec], Bucket], None]


class Sender:
    """The learner's end, on each of its ranks. Implements ``Staging``, but keeps no copy of the weights."""

    def __init__(self, wire: Wire, *, rank: int, ranks: int, device: str, workers: int) -> None:
        """``workers``: receivers per engine."""
        self._wire: Wire = wire
        self._rank, self._ranks, self._device, self._workers = rank, ranks, device, workers
        self._store: Any = None
        self._address = ""
        self._group: Group | None = None
        self._names = itertools.count()
        self._layout: list[list[TensorSpec]] = []

    def stage(self, version: int, buckets: Iterable[Bucket]) -> SentWeights:
        """Announce a version. The first time, gather everything once, to know what the buckets contain."""
        if self._store is None and self._rank == 0:
            self._store, self._address = host_store()
        if not self._layout:
            self._layout = [[spec_of(name, tensor) for name, tensor in bucket] for bucket in buckets]
        tensors = tuple(spec for specs in self._layout for spec in specs)
        counts = tuple(len(specs) for specs in self._layout)
        return SentWeights(version, tensors, self._wire, self._address, counts, self._workers)

    def refuse(self, weights: SentWeights, reason: str) -> None:
        """Tell the receivers of a round that nothing will be sent."""
        if self._rank == 0 and self._store is not None:
            Attempt(self._store, weights.round, 0).decide(Plan(0, self._ranks, refusal=reason))

    def send(self, weights: SentWeights, gathered: Callable[[], Iterator[Bucket]]) -> int:
        """Send the weights to the receivers of a round; return how many reported that they have them.

        Args:
            weights: what ``stage`` returned, for a number of engines.
            gathered: gathers the weights once more, in buckets; all ranks call it equally often.
        """
        if self._store is None:
            self._store = reach_store(weights.address)
        missing, sent, limit = weights.receivers, 0, ARRIVE_S
        for number in range(ATTEMPTS):
            attempt = Attempt(self._store, weights.round, number)
            plan = self._plan(attempt, missing, limit)
            if not plan.members:
                break
            done = self._conclude(attempt, self._attempt(attempt, plan, gathered()))
            sent, missing, limit = sent + done, plan.members - done, REJOIN_S
            if not missing:
                break
        return sent

    def release(self) -> None:
        """Leave the group, and end the store. Idempotent."""
        self._leave()
        self._store = None

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _plan(self, attempt: Attempt, expected: int, limit: float) -> Plan:
        """Decide who takes part, or learn it from rank 0."""
        if self._rank > 0:
            return attempt.plan(limit + 2 * CONNECT_S)
        connections = attempt.arrivals(expected, limit)
        group = self._group
        if group is None or group.size != len(connections) + 1 or set(connections) != {group.name}:
            self._leave()
        name = self._group.name if self._group else f"group-{next(self._names)}"
        plan = Plan(len(connections), self._ranks, name)
        attempt.decide(plan)
        return plan

    def _attempt(self, attempt: Attempt, plan: Plan, buckets: Iterator[Bucket]) -> bool:
        """Send all buckets and wait until they are loaded; return whether that succeeded."""
        try:
            with self._sending(attempt, plan) as put:
                for index, (specs, bucket) in enumerate(zip(self._layout, buckets, strict=True)):
                    if [spec_of(name, tensor) for name, tensor in bucket] != specs:
                        raise LearnerError("the model's tensors have changed since the first publication")
                    put(index, specs, bucket)
                attempt.wait_until(lambda: attempt.counted("done") >= plan.members, BROADCAST_S, "a receiver's report")
            return True
        except Interrupted as error:
            attempt.fail(str(error))
            for _ in buckets:  # The other ranks may be gathering them.
                pass
            return False

    def _conclude(self, attempt: Attempt, complete: bool) -> int:
        """Return how many receivers have all weights, equal on all ranks."""
        if self._rank > 0:
            return attempt.result(2 * BROADCAST_S)
        if not complete:
            self._leave()
        done = attempt.counted("done")
        attempt.conclude(done)
        return done

    def _sending(self, attempt: Attempt, plan: Plan) -> AbstractContextManager[_Put]:
        if self._wire == "ipc":
            return self._filling(attempt, plan)
        if self._rank > 0:
            return contextlib.nullcontext(lambda index, specs, bucket: None)
        group = self._group
        if group is None:
            group = self._group = Group(attempt, plan.connection, self._wire, 0, plan.members + 1, self._device)
        flat = torch.empty(self._largest(), dtype=torch.uint8, device=self._device)

        def put(index: int, specs: list[TensorSpec], bucket: Bucket) -> None:
            part = flat[: offsets(specs)[1]]
            pack(bucket, specs, part)
            group.broadcast(attempt, part)

        return contextlib.nullcontext(put)

    @contextlib.contextmanager
    def _filling(self, attempt: Attempt, plan: Plan) -> Iterator[_Put]:
        """Put buckets into a buffer of this rank, one after the other, when all receivers have read the last one."""
        with own_buffer(self._largest(), self._device) as (buffer, handle):
            attempt.store.set(f"buffer/{place_of(self._device)}", json.dumps(handle))
            attempt.count("buffers")

            def put(index: int, specs: list[TensorSpec], bucket: Bucket) -> None:
                read = index * plan.members
                attempt.wait_until(lambda: attempt.counted("read") >= read, BROADCAST_S, f"readers of bucket {index}")
                pack(bucket, specs, buffer)
                if buffer.is_cuda:
                    torch.cuda.synchronize(buffer.device)
                attempt.count("filled")

            yield put

    def _largest(self) -> int:
        return max((offsets(specs)[1] for specs in self._layout), default=0)
