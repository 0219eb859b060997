"""Weights in shared memory: exact bytes in any process, and no memory that outlives its owner."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from weights_reading import state_of

from agentkit.errors import EngineError, LearnerError
from agentkit.trainers.weights.base import Receiver
from agentkit.trainers.weights.shared_memory import SharedStaging, SharedWeights

STATE = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0, dtype=torch.float64).reshape(3, 4).T,
    "half": torch.linspace(-3, 3, 7).to(torch.bfloat16),
    "eight": torch.linspace(-3, 3, 5).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "last": torch.arange(5, dtype=torch.int16),
}
"""Sizes that no other type's alignment divides."""

OWNER = """
import pickle, sys, time
import torch
from agentkit.trainers.weights.shared_memory import SharedStaging
weights = SharedStaging().stage(3, [[("a", torch.arange(2_000_000))]])
print(pickle.dumps(weights).hex(), flush=True)
time.sleep(600)
"""

READER = """
import pickle, sys
from agentkit.trainers.weights.base import Receiver
weights = pickle.loads(bytes.fromhex(sys.stdin.read()))
for bucket in weights.buckets(Receiver()):
    for name, tensor in bucket:
        print(name, tensor.dtype, tuple(tensor.shape), tensor.double().flatten().tolist())
"""


def buckets() -> Iterator[list[tuple[str, Tensor]]]:
    items = list(STATE.items())
    for start in range(0, len(items), 3):
        yield items[start : start + 3]


@pytest.fixture
def staging() -> Iterator[SharedStaging]:
    staging = SharedStaging()
    yield staging
    staging.release()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("error")
def test_tensors_come_back_bit_for_bit(staging: SharedStaging) -> None:
    weights = pickle.loads(pickle.dumps(staging.stage(4, buckets())))
    assert weights.version == 4
    got = state_of(weights)
    assert got.keys() == STATE.keys()
    for name, tensor in STATE.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))


def test_plain_data_describes_the_same_weights(staging: SharedStaging) -> None:
    weights = staging.stage(4, buckets())
    assert SharedWeights.of_plain(weights.plain()) == weights


@pytest.mark.slow
def test_another_process_reads_the_same(staging: SharedStaging) -> None:
    weights = staging.stage(4, buckets())
    source = pickle.dumps(weights).hex()
    got = subprocess.run(
        [sys.executable, "-c", READER], input=source, capture_output=True, text=True, check=True, timeout=110
    ).stdout.splitlines()
    assert got == [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.double().flatten().tolist()}"
        for name, tensor in STATE.items()
    ]


def test_a_reader_keeps_its_version_while_the_next_is_staged(staging: SharedStaging) -> None:
    reading = staging.stage(1, [[("a", torch.full((1000,), 1.0))]]).buckets(Receiver())
    (_, data), *_ = next(reading)
    staging.stage(2, [[("a", torch.full((1000,), 2.0))]])
    staging.release()
    assert data.tolist() == [1.0] * 1000


def test_weights_that_were_replaced_or_released_are_refused(staging: SharedStaging) -> None:
    first = staging.stage(1, buckets())
    second = staging.stage(2, buckets())  # has the same descriptor
    assert first.segment.descriptor == second.segment.descriptor
    with pytest.raises(EngineError, match=r"version 1 .* publish them again"):
        state_of(first)
    staging.release()
    staging.release()
    with pytest.raises(EngineError, match=r"version 2 .* publish them again"):
        state_of(second)


def test_nothing_stays_open(staging: SharedStaging) -> None:
    def failing() -> Iterator[list[tuple[str, Tensor]]]:
        yield from buckets()
        raise LearnerError("no")

    before = descriptors()
    for version in range(3):
        state_of(staging.stage(version, buckets()))
    with pytest.raises(LearnerError, match="no"):
        staging.stage(3, failing())
    assert descriptors() == before


@pytest.mark.slow
def test_the_memory_ends_with_a_killed_owner() -> None:
    before = set(Path("/dev/shm").iterdir())
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        weights = pickle.loads(bytes.fromhex(owner.stdout.readline()))
        assert state_of(weights)["a"][-1] == 1_999_999
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        with pytest.raises(EngineError, match="publish them again"):
            state_of(weights)
    finally:
        owner.kill()
        owner.communicate()
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "agentkit" in path.name]
