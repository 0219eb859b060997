"""Decoding returns recorded trajectories bit for bit, and damaged bytes raise."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.codec import (
    decode_columns,
    decode_group,
    decode_trajectory,
    encode_columns,
    encode_group,
    encode_trajectory,
)
from agentkit.errors import RunDirectoryError
from agentkit.types import Group, Trajectory, Turn

# Lone surrogates included: an environment may return bytes decoded with surrogateescape.
texts = st.text(st.characters())
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5).map(lambda items: np.array(items, np.int32))
# Any bit pattern: signed zeros, infinities, NaNs with payloads.
floats = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(lambda bits: np.array(bits, np.uint32).view(np.float32))
numbers = st.floats(allow_nan=False)

turns = st.builds(
    Turn,
    prompt_ids=ids,
    action_ids=ids,
    action_logprobs=floats,
    versions=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=3).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    reward=numbers,
    observation=texts,
    response=texts,
    actions=st.lists(texts, max_size=3).map(tuple),
    valid=st.booleans(),
    generate_s=numbers,
    env_s=numbers,
)
trajectories = st.builds(
    Trajectory,
    group_id=st.integers(0, 2**60),
    member=st.integers(0, 99),
    env_id=texts,
    seed=st.integers(0, 2**63),
    version_started=st.integers(0, 99),
    turns=st.lists(turns, max_size=3),
    final_ids=ids,
    outcome=st.sampled_from(["terminated", "truncated", "voided"]),
    reason=texts,
    success=st.booleans(),
    metrics=st.dictionaries(texts, numbers, max_size=3),
    attempt=st.integers(0, 5),
    duration_s=numbers,
    ended_at=numbers,
    sandboxes=st.lists(st.tuples(texts, texts), max_size=3).map(tuple),
)
groups = st.builds(
    Group,
    group_id=st.integers(0, 99),
    seed=st.integers(0, 99),
    version_started=st.integers(0, 99),
    members=st.lists(trajectories, max_size=3),
)


def same(first: object, second: object) -> bool:
    """Equal in type and value, arrays bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        return first.dtype == second.dtype and first.tobytes() == second.tobytes()
    if dataclasses.is_dataclass(first):
        return all(same(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    if isinstance(first, (list, tuple)):
        assert isinstance(second, (list, tuple))
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@settings(deadline=None, max_examples=60)
@given(groups)
def test_groups_come_back_bit_for_bit(group: Group) -> None:
    assert same(decode_group(encode_group(group)), group)


@settings(deadline=None, max_examples=60)
@given(trajectories)
def test_trajectories_come_back_bit_for_bit(trajectory: Trajectory) -> None:
    decoded = decode_trajectory(encode_trajectory(trajectory))
    assert same(decoded, trajectory)
    for turn in decoded.turns:
        turn.action_logprobs += 1  # decoded arrays are one's own, and writable


def example() -> Trajectory:
    turn = Turn(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), np.zeros(2, np.float32), ((0, 2),))
    return Trajectory(1, 2, "X-v0", 3, 0, turns=[turn], metrics={"steps": 2.0})


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_damaged_bytes_raise(data: st.DataObject) -> None:
    whole = encode_trajectory(example())
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place]
    else:
        damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    try:
        decoded = decode_trajectory(damaged)
    except RunDirectoryError as error:
        assert "cannot be read back" in str(error)  # noqa: PT017 (both ends are legal, see below)
    else:
        # A flipped bit in zlib's two header bytes may leave their meaning unchanged.
        assert same(decoded, example())


def test_a_group_is_not_decoded_as_a_trajectory() -> None:
    with pytest.raises(RunDirectoryError, match="it holds a trajectory"):
        decode_group(encode_trajectory(example()))


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int64), np.zeros((3, 1), np.int32), [1, 2, 3], np.zeros(3, np.float32)]
)
def test_arrays_of_another_type_are_refused(array: object) -> None:
    trajectory = example()
    trajectory.turns[0].prompt_ids = array  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match=r"prompt_ids is .*; it must be a numpy array, int32"):
        encode_trajectory(trajectory)


def test_numpy_scalars_are_recorded_as_numbers() -> None:
    trajectory = example()
    trajectory.turns[0].reward = np.float32(0.5)  # pyright: ignore[reportAttributeAccessIssue]
    trajectory.metrics["best"] = np.int64(3)  # pyright: ignore[reportArgumentType]
    decoded = decode_trajectory(encode_trajectory(trajectory))
    assert decoded.turns[0].reward == 0.5
    assert decoded.metrics["best"] == 3


def test_the_format_is_the_documented_one() -> None:
    import json
    import zlib

    data = encode_trajectory(example())
    assert data[:4] == b"AKR1"
    body = zlib.decompress(data[4:])
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    assert header["kind"] == "trajectory"
    assert header["value"]["turns"][0]["prompt_ids"] == 3
    arrays = body[4 + length :]
    assert np.frombuffer(arrays[:12], "<i4").tolist() == [0, 1, 2]
    assert len(arrays) == 12 + 8 + 8


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), floats))
def test_columns_come_back_bit_for_bit(columns: dict[str, np.ndarray]) -> None:
    back = decode_columns(encode_columns(columns))
    assert {name: column.tobytes() for name, column in back.items()} == {
        name: column.tobytes() for name, column in columns.items()
    }


def test_columns_are_float32_and_damage_is_an_error() -> None:
    double: Any = np.zeros(2)
    with pytest.raises(TypeError, match="value_0 is float64"):
        encode_columns({"value_0": double})
    data = encode_columns({"advantage": np.ones(3, np.float32)})
    for damaged in (data[:-1], encode_group(Group(0, 0, 0, []))):
        with pytest.raises(RunDirectoryError):
            decode_columns(damaged)
