"""Buckets broadcast from the learner's first rank to all receivers: NCCL between GPUs, Gloo between CPUs.

The process group exists beside torch's default one, which belongs to the ranks of the learner or of vLLM. It is kept
from one update to the next, as long as its members stay the same.

Invariant: a member that is lost or late interrupts the others within a limit; it neither blocks them for ever nor ends
their processes, which is what NCCL and torch's watchdog over it would do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from agentkit.trainers.weights.rendezvous import CONNECT_S, NOTICE_S, Attempt, Interrupted, own_address

BROADCAST_S = 60.0
"""Seconds for one bucket."""
ABORT_S = 5.0
"""Seconds for the end of a group whose members may be gone."""

Backend = Literal["nccl", "gloo"]


class Group:
    """A process group in which rank 0, the learner, sends."""

    def __init__(self, attempt: Attempt, name: str, backend: Backend, rank: int, size: int, device: str) -> None:
        """Connect the members. Raises ``Interrupted`` if they do not all come within ``CONNECT_S``."""
        self.name, self.size = name, size
        self._backend, self._device = backend, device
        store = PrefixStore(name, attempt.store)

        def connect() -> Any:
            group = _nccl(store, rank, size) if backend == "nccl" else _gloo(store, rank, size)
            # NCCL connects at the first collective, in a call that a missing member blocks.
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            with _current(device):
                group.broadcast([first], _options()).wait()
            return group

        self._group: Any = _within(CONNECT_S, connect)

    def broadcast(self, attempt: Attempt, flat: Tensor) -> None:
        """Send ``flat`` from rank 0, receive into it on others. Raises ``Interrupted``; then close the group."""
        try:
            with _current(self._device):
                work = self._group.broadcast([flat], _options())
            end, look = time.monotonic() + BROADCAST_S, time.monotonic() + NOTICE_S
            while not work.is_completed():
                now = time.monotonic()
                if now > end:
                    raise Interrupted(f"a bucket was not broadcast within {BROADCAST_S:g} s")
                if now > look:
                    if reason := attempt.failed():
                        raise Interrupted(reason)
                    look = now + NOTICE_S
                time.sleep(0.0005)
            work.wait()
        except RuntimeError as error:  # a member is gone
            raise Interrupted(f"the broadcast failed: {error}") from error

    def close(self) -> None:
        """Leave the group without waiting for others."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(Interrupted, RuntimeError):
            _within(ABORT_S, group.abort)


def _gloo(store: Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=CONNECT_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address())]  # type: ignore[attr-defined]
    group = dist.ProcessGroupGloo(store, rank, size, options)  # type: ignore[call-overload]
    group.set_timeout(timedelta(seconds=BROADCAST_S))
    return group


def _nccl(store: Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=BROADCAST_S)
    # With this variable torch reports errors to the caller. Otherwise its watchdog ends the process.
    with _set("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def _options() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _current(device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.startswith("cuda") else contextlib.nullcontext()


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _within(limit: float, function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns. Raises ``Interrupted`` if it fails, or takes longer and is left alone."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call, name="weights", daemon=True)
    thread.start()
    thread.join(limit)
    if not outcome:
        raise Interrupted(f"the members of an update did not connect within {limit:g} s")
    result, error = outcome[0]
    if error is not None:
        raise Interrupted(f"the members of an update did not connect: {error}") from error
    return result
