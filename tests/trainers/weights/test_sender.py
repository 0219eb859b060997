"""Weights sent to engines: exact bytes on every wire, and progress whoever is lost.

Receivers and ranks are threads here, each with connections of its own, and processes where one is killed.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from weights_reading import state_of

from agentkit.config import RunConfig
from agentkit.errors import EngineError, WeightsUnavailable
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.learner.torch_learner import Learner
from agentkit.trainers.weights import rendezvous, sender
from agentkit.trainers.weights.base import Bucket, Receiver
from agentkit.trainers.weights.broadcast import Group
from agentkit.trainers.weights.packing import offsets, pack, unpack
from agentkit.trainers.weights.sender import Sender
from agentkit.trainers.weights.sent import SentWeights, Wire
from agentkit.trainers.weights.tensors import spec_of

WIRES: list[Wire] = ["gloo", "ipc"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.int64, torch.bool)


def state(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.rand(30, 40, generator=generator),
        "transposed": torch.rand(5, 7, generator=generator, dtype=torch.float64).T,
        "half": torch.rand(1001, generator=generator).to(torch.bfloat16),
        "flags": torch.rand(13, generator=generator) > 0.5,
        "scalar": torch.tensor(version),
        "empty": torch.empty(0, 3),
        "last": torch.rand(3000, generator=generator),
    }


def gathered(version: int) -> Iterator[Bucket]:
    items = list(state(version).items())
    for start in range(0, len(items), 2):
        yield items[start : start + 2]


class Ranks:
    """Some ranks that send, as those of a learner do: each in a thread, gathering in step."""

    def __init__(self, wire: Wire, ranks: int = 1) -> None:
        self.senders = [Sender(wire, rank=k, ranks=ranks, device="cpu", workers=1) for k in range(ranks)]
        self.threads = ThreadPoolExecutor(ranks)
        self.gathers = [0] * ranks
        """Buckets that each rank has gathered."""
        self.delay = 0.0

    def publish(self, version: int) -> SentWeights:
        weights, *_ = [each.stage(version, gathered(version)) for each in self.senders]
        return weights

    def send(self, weights: SentWeights) -> list[Future[int]]:
        return [
            self.threads.submit(each.send, weights, lambda rank=rank: self._gather(rank, weights.version))
            for rank, each in enumerate(self.senders)
        ]

    def _gather(self, rank: int, version: int) -> Iterator[Bucket]:
        for bucket in gathered(version):
            self.gathers[rank] += 1
            time.sleep(self.delay)
            yield bucket

    def close(self) -> None:
        for each in self.senders:
            each.release()
        self.threads.shutdown()


@pytest.fixture
def learner() -> Iterator[Callable[..., Ranks]]:
    learners: list[Ranks] = []

    def make(*args: Any, **kwargs: Any) -> Ranks:
        learners.append(Ranks(*args, **kwargs))
        return learners[-1]

    yield make
    for each in learners:
        each.close()


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may depend on the length of the limits."""
    monkeypatch.setattr(sender, "ARRIVE_S", 10.0)
    monkeypatch.setattr(sender, "REJOIN_S", 3.0)
    monkeypatch.setattr(rendezvous, "REACH_S", (1.0, 1.0, 1.0))


def receive(weights: SentWeights, receivers: list[Receiver]) -> list[Future[dict[str, Tensor]]]:
    pool = ThreadPoolExecutor(len(receivers))
    futures = [pool.submit(state_of, weights, receiver) for receiver in receivers]
    pool.shutdown(wait=False)
    return futures


def check(got: dict[str, Tensor], version: int) -> None:
    expected = state(version)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def update(learner: Ranks, version: int, receivers: list[Receiver]) -> None:
    """Publish, send and receive a version, as the router does."""
    weights = learner.publish(version).for_engines(len(receivers))
    sending = learner.send(weights)
    for future in receive(weights, receivers):
        check(future.result(60), version)
    assert [future.result(60) for future in sending] == [len(receivers)] * len(sending)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6), st.data())
def test_a_packed_bucket_is_unpacked_bit_for_bit(kinds: list[tuple[torch.dtype, list[int]]], data: Any) -> None:
    bucket = [(str(index), torch.randint(0, 2, shape).to(dtype)) for index, (dtype, shape) in enumerate(kinds)]
    specs = [spec_of(name, tensor) for name, tensor in bucket]
    starts, size = offsets(specs)
    flat = torch.full((size + data.draw(st.integers(0, 9)),), 255, dtype=torch.uint8)
    pack(bucket, specs, flat)
    assert all(start % 64 == 0 for start in starts)
    for (name, tensor), (of, got) in zip(bucket, unpack(flat, specs), strict=True):
        assert (of, got.dtype, got.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_plain_data_describes_the_same_weights(learner: Callable[..., Ranks]) -> None:
    weights = learner("gloo").publish(3).for_engines(2)
    assert SentWeights.of_plain(weights.plain()) == weights
    assert pickle.loads(pickle.dumps(weights)) == weights


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_engines_get_every_version(learner: Callable[..., Ranks], wire: Wire, ranks: int) -> None:
    sending, receivers = learner(wire, ranks), [Receiver() for _ in range(3)]
    for version in (1, 2):
        update(sending, version, receivers)
    update(sending, 3, receivers[:2])  # one was lost in between
    update(sending, 4, [*receivers[:2], Receiver()])  # and replaced
    assert set(sending.gathers) == {4 * 4}  # no rank gathers more often than the others, or than updates need


def test_a_group_is_kept_until_its_members_change(
    learner: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    connect = Group.__init__

    def counting(self: Group, attempt: Any, name: str, *rest: Any) -> None:
        made.append(name)
        connect(self, attempt, name, *rest)

    monkeypatch.setattr(Group, "__init__", counting)
    sending, receivers = learner("gloo"), [Receiver(), Receiver()]
    update(sending, 1, receivers)
    update(sending, 2, receivers)
    assert len(made) == 3  # one end each
    update(sending, 3, [receivers[0], Receiver()])
    assert len(set(made)) == 2


@pytest.mark.parametrize("wire", WIRES)
def test_an_engine_that_does_not_come_is_left_out(
    learner: Callable[..., Ranks], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ARRIVE_S", 2.0)
    sending = learner(wire, 2)
    weights = sending.publish(1).for_engines(2)
    counts = sending.send(weights)
    (future,) = receive(weights, [Receiver()])
    check(future.result(60), 1)
    assert [count.result(60) for count in counts] == [1, 1]


@pytest.mark.parametrize("wire", WIRES)
def test_an_engine_that_fails_interrupts_no_other(learner: Callable[..., Ranks], wire: Wire) -> None:
    """It takes one bucket and gives up; the others start over, and load no bucket twice."""
    sending = learner(wire, 2)
    weights = sending.publish(5).for_engines(3)
    counts = sending.send(weights)
    futures = receive(weights, [Receiver(), Receiver()])
    buckets: Any = weights.buckets(Receiver())
    next(buckets)
    buckets.close()  # what an exception of the loop over them does
    for future in futures:
        check(future.result(60), 5)
    assert [count.result(60) for count in counts] == [2, 2]
    assert len(set(sending.gathers)) == 1


def test_weights_are_refused_when_they_have_changed(learner: Callable[..., Ranks]) -> None:
    sending = learner("gloo")
    weights = sending.publish(1).for_engines(1)
    (future,) = receive(weights, [Receiver()])
    sending.senders[0].refuse(weights, "the learner has trained")
    with pytest.raises(WeightsUnavailable, match="the learner has trained"):
        future.result(30)


def test_a_learner_without_engines_gathers_nothing(
    learner: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ARRIVE_S", 0.5)
    sending = learner("gloo", 2)
    assert [future.result(60) for future in sending.send(sending.publish(1).for_engines(2))] == [0, 0]
    assert sending.gathers == [0, 0]


def test_a_lost_learner_is_an_error_of_the_engine(learner: Callable[..., Ranks]) -> None:
    sending = learner("gloo")
    weights = sending.publish(1).for_engines(1)
    sending.senders[0].release()
    with pytest.raises(EngineError, match="publish them again"):
        state_of(weights)


async def test_an_engine_serves_the_learners_weights_until_it_trains() -> None:
    settings = {"weights": "gloo", "max_context": 64, "max_batch": 2}
    config = RunConfig.model_validate({"env": {"id": "FrozenLake-v1"}, "cluster": {}, "engine": settings, "seed": 3})
    sending, engine = Learner(config), HFEngine(config.model, config.engine, seed=4)
    try:
        await sending.start()  # not at once: both draw fresh weights from torch's global generator
        await engine.start()
        before = await engine.checksum()
        weights = (await sending.publish(1)).for_engines(1)
        assert isinstance(weights, SentWeights)
        await engine.pause("abort")
        served, _ = await asyncio.gather(engine.update_weights(weights), sending.send(weights))
        assert served == 1
        equal = HFEngine(config.model, config.engine, seed=0, model_object=sending.model)
        await equal.start()
        assert before != await engine.checksum() == await equal.checksum()
        await equal.close()
        sending._published = None  # as after a training step
        weights = weights.for_engines(1)
        refusal, sent = await asyncio.gather(
            engine.update_weights(weights), sending.send(weights), return_exceptions=True
        )
        assert isinstance(refusal, WeightsUnavailable)
        assert not refusal.fatal
        assert sent == 0
        await engine.resume()
    finally:
        await engine.close()
        await sending.close()


ENGINE = """
import pickle, sys
from agentkit.trainers.weights.base import Receiver
for bucket in pickle.loads(bytes.fromhex(sys.stdin.readline())).buckets(Receiver()):
    print(*(name for name, _ in bucket), flush=True)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("wire", WIRES)
def test_an_engine_killed_in_the_middle_interrupts_no_other(
    learner: Callable[..., Ranks], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ARRIVE_S", 100.0)  # the process imports torch first
    sending = learner(wire, 2)
    sending.delay = 1.0  # time to kill
    weights = sending.publish(7).for_engines(3)
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps(weights).hex() + "\n")
        process.stdin.flush()
        counts = sending.send(weights)
        futures = receive(weights, [Receiver(), Receiver()])
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        if wire == "ipc":  # nothing tells that a reader is gone but its silence
            monkeypatch.setattr(sender, "BROADCAST_S", 5.0)
        for future in futures:
            check(future.result(120), 7)
        assert [count.result(120) for count in counts] == [2, 2]
    finally:
        process.kill()
        process.wait()


def test_no_thread_is_left(learner: Callable[..., Ranks]) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "weights"}
    update(learner("gloo"), 1, [Receiver(), Receiver()])
    time.sleep(0.1)
    assert {thread for thread in threading.enumerate() if thread.name == "weights"} <= before
