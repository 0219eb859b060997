"""Weights that the learner sends while engines update, as an engine receives them.

They come over a process group (``broadcast.py``), or through a buffer of the learner's (``buffer.py``). A receiver is
one engine, or one of its workers. ``sender.py`` is the learner's end.

Invariant: a receiver gets every bucket exactly once and in order. If a participant is lost, the others meet again and
the learner sends once more; receivers skip the buckets that they have.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import DistError

from agentkit.errors import EngineError, WeightsUnavailable
from agentkit.trainers.weights.base import Bucket, Receiver, TensorSpec, Weights
from agentkit.trainers.weights.broadcast import BROADCAST_S, Group
from agentkit.trainers.weights.buffer import opened, place_of
from agentkit.trainers.weights.packing import offsets, unpack
from agentkit.trainers.weights.rendezvous import ARRIVE_S, ATTEMPTS, CONNECT_S, Attempt, Interrupted, Plan, reach_store

Wire = Literal["nccl", "gloo", "ipc"]
"""How a bucket travels: broadcast by NCCL or Gloo, or read from the learner's memory."""

_Take = Callable[[int, list[TensorSpec]], Tensor]


@dataclass(frozen=True)
class SentWeights(Weights):
    """Weights that the learner sends in one round to ``receivers`` receivers at a time."""

    sent: ClassVar[bool] = True

    wire: Wire
    address: str
    """Of the store in which the participants meet."""
    counts: tuple[int, ...]
    """Numbers of tensors in the buckets."""
    workers: int
    """Receivers per engine."""
    round: str = ""
    receivers: int = 0

    def for_engines(self, number: int) -> SentWeights:
        return replace(self, round=secrets.token_hex(6), receivers=number * self.workers)

    def layout(self) -> list[list[TensorSpec]]:
        """Return the descriptions of the tensors of each bucket."""
        specs = iter(self.tensors)
        return [list(itertools.islice(specs, count)) for count in self.counts]

    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        """Take part in the round as one of its receivers."""
        taken, reason = 0, ""
        try:
            store = reach_store(self.address)
            for number in range(ATTEMPTS):
                attempt = Attempt(store, self.round, number)
                mine, plan = self._meet(attempt, receiver)
                with _membership(attempt, receiver), self._receiving(attempt, plan, receiver, mine) as take:
                    for index, specs in enumerate(self.layout()):
                        flat = take(index, specs)
                        if index == taken:
                            yield unpack(flat, specs)
                            taken += 1
                    attempt.count("done")
                    return
                reason = attempt.failed()
            raise Interrupted(f"{ATTEMPTS} attempts failed; the last one, because {reason}")
        except (Interrupted, DistError) as error:
            raise EngineError(
                f"the weights of version {self.version} did not arrive ({error}): publish them again"
            ) from error

    def _meet(self, attempt: Attempt, receiver: Receiver) -> tuple[int, Plan]:
        """Return the number of this receiver in an attempt, and the learner's plan of it."""
        group = receiver.connection
        mine = attempt.arrive(group.name if isinstance(group, Group) else "")
        plan = attempt.plan(ARRIVE_S + CONNECT_S)
        if plan.refusal:
            raise WeightsUnavailable(f"the weights of version {self.version} are not sent: {plan.refusal}")
        if mine > plan.members:
            raise EngineError(f"this engine came too late for the update to version {self.version}")
        return mine, plan

    def _receiving(self, attempt: Attempt, plan: Plan, receiver: Receiver, mine: int) -> AbstractContextManager[_Take]:
        if self.wire == "ipc":
            return _reading(attempt, plan.ranks, receiver.device)
        device = "cpu" if self.wire == "gloo" else receiver.device
        group = receiver.connection
        if not isinstance(group, Group) or group.name != plan.connection:
            receiver.close()
            group = receiver.connection = Group(attempt, plan.connection, self.wire, mine, plan.members + 1, device)

        def take(index: int, specs: list[TensorSpec]) -> Tensor:
            # New memory for each bucket: an engine may keep tensors until it has all of a layer.
            flat = torch.empty(offsets(specs)[1], dtype=torch.uint8, device=device)
            group.broadcast(attempt, flat)
            return flat

        return contextlib.nullcontext(take)

    def plain(self) -> dict[str, Any]:
        """Return the object as lists, strings and numbers; ``of_plain`` reads it."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> SentWeights:
        """Inverse of ``plain``."""
        tensors = tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in plain["tensors"])
        return cls(**{**plain, "tensors": tensors, "counts": tuple(plain["counts"])})


@contextlib.contextmanager
def _membership(attempt: Attempt, receiver: Receiver) -> Iterator[None]:
    """Leave the attempt with its first error, which an interruption alone survives."""
    try:
        yield
    except BaseException as error:
        # Also if the engine fails to load a bucket: the others must not wait for it.
        receiver.close()
        if not attempt.failed():
            attempt.fail(f"a receiver left ({str(error) or type(error).__name__})")
        if not isinstance(error, Interrupted):
            raise


@contextlib.contextmanager
def _reading(attempt: Attempt, ranks: int, device: str) -> Iterator[_Take]:
    """Take buckets from the buffer of that of the learner's ranks which is on ``device``."""
    place = place_of(device)
    attempt.wait_until(lambda: attempt.counted("buffers") == ranks, CONNECT_S, "the learner's buffers")
    if not attempt.store.check([f"buffer/{place}"]):
        raise EngineError(
            "no rank of the learner is on the device of this engine: engine.weights=ipc needs both on the same GPUs; "
            "set engine.weights to nccl or object_store"
        )
    handle = json.loads(attempt.store.get(f"buffer/{place}"))
    with opened(handle, device) as buffer:

        def take(index: int, specs: list[TensorSpec]) -> Tensor:
            wanted = (index + 1) * ranks
            attempt.wait_until(lambda: attempt.counted("filled") >= wanted, BROADCAST_S, f"bucket {index}")
            flat = buffer[: offsets(specs)[1]].clone()
            if flat.is_cuda:
                torch.cuda.synchronize(flat.device)
            attempt.count("read")
            return flat

        yield take
