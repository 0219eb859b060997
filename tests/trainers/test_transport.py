"""Frames between processes arrive complete and in order at any size, and errors keep their type."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest
from cluster_roles import PickyError
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import EngineError, RoleError
from agentkit.trainers.transport import (
    HEADER,
    OUT_OF_BAND,
    SCRATCH,
    FrameKind,
    RoleConnection,
    decode,
    decode_error,
    encode,
)
from agentkit.trainers.transport import encode_error as encode_remote

SIZES = st.one_of(
    st.integers(0, 300),
    st.builds(
        lambda base, off: base + off,
        st.sampled_from([OUT_OF_BAND, SCRATCH - HEADER.size, SCRATCH, 3 * SCRATCH]),
        st.integers(-40, 40),
    ),
)


async def _exchange(values: list[object], pause_every: int) -> list[tuple[int, int, object]]:
    """Send ``values`` in ticks of ``pause_every`` values; return the received ones."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setblocking(False)
    arrived: list[tuple[int, int, object]] = []
    complete, lost = asyncio.Event(), asyncio.Event()

    def on_frame(kind: int, call_id: int, body: bytes | bytearray, num_buffers: int) -> None:
        arrived.append((kind, call_id, decode(body, num_buffers)))
        if len(arrived) == len(values):
            complete.set()

    sender = await RoleConnection.open(left, lambda *frame: None, lambda: None)
    receiver = await RoleConnection.open(right, on_frame, lost.set)
    for i, value in enumerate(values):
        sender.send(FrameKind.CALL, i, encode(value))
        if i % pause_every == pause_every - 1:
            await asyncio.sleep(0)
    await asyncio.wait_for(complete.wait(), 20)
    sender.close()
    await asyncio.wait_for(lost.wait(), 5)
    sender.send(FrameKind.CALL, 0, encode(None))  # dropped in silence: the loss was told
    receiver.close()
    await asyncio.sleep(0)
    return arrived


@settings(max_examples=60, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_frames_of_any_size_arrive_whole_and_in_order(sizes: list[int], pause_every: int, arrays: int) -> None:
    rng = np.random.default_rng(0)
    values = [[rng.integers(0, 256, size, np.uint8) for _ in range(arrays)] for size in sizes]
    arrived = asyncio.run(asyncio.wait_for(_exchange(list(values), pause_every), 30))
    assert [(kind, call_id) for kind, call_id, _ in arrived] == [(FrameKind.CALL, i) for i in range(len(values))]
    for sent, (_, _, received) in zip(values, arrived, strict=True):
        assert isinstance(received, list)
        for one, other in zip(sent, received, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "bool", "int64"])
@pytest.mark.parametrize("size", [0, 1, 100, 20_001])
def test_arrays_keep_their_kind_and_arrive_aligned_and_writable(dtype: str, size: int) -> None:
    array = np.random.default_rng(1).integers(0, 2, size).astype(dtype)
    parts, num_buffers = encode({"x": array, "y": [array, array[::2]], "z": b"odd"})
    received = decode(bytearray(b"".join(parts)), num_buffers)
    for one in (received["x"], received["y"][0]):
        np.testing.assert_array_equal(one, array)
        assert one.dtype == array.dtype
        assert one.flags.aligned
        assert one.flags.writeable
    assert (num_buffers > 0) == (array.nbytes >= OUT_OF_BAND)


def test_large_arrays_are_not_copied_when_encoding() -> None:
    array = np.zeros(OUT_OF_BAND, np.uint8)
    parts, _ = encode(array)
    assert any(isinstance(part, memoryview) and np.shares_memory(np.asarray(part), array) for part in parts)


def _raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        parts, num_buffers = encode_remote(caught, "the role (pid 1)")
        return decode_error(bytearray(b"".join(parts)), num_buffers)


def test_errors_of_the_package_keep_type_attributes_and_the_remote_traceback() -> None:
    error = _raised(PickyError(code=3))
    assert isinstance(error, PickyError)
    assert (error.code, str(error)) == (3, "code 3")
    assert "_raised" in str(error.__cause__)


def test_an_error_that_does_not_pickle_keeps_type_and_text() -> None:
    original = EngineError("full")
    original.lock = asyncio.sleep  # type: ignore[attr-defined]
    original.callback = lambda: None  # type: ignore[attr-defined]
    error = _raised(original)
    assert type(error) is EngineError
    assert str(error) == "full"


def test_other_errors_become_role_errors_with_type_and_traceback() -> None:
    error = _raised(ValueError("what"))
    assert type(error) is RoleError
    assert "the role (pid 1) raised ValueError: what" in str(error)
    assert "Traceback" in str(error)


def test_unpicklable_arguments_fail_before_they_are_sent() -> None:
    with pytest.raises(Exception, match=r"lambda|local"):
        encode(lambda: None)
