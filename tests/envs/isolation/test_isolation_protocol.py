"""Strict decoding of messages of sandboxed environments: every invalid byte is an error."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs.framing import FrameError, FrameReader
from agentkit.envs.isolation import protocol, validation
from agentkit.errors import EnvContractError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc"), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
DESCRIPTION = {
    "instructions": "Go.",
    "max_turns": 3,
    "actions_per_turn": 1,
    "tools": [],
    "concurrency": "inline",
    "deterministic": True,
    "has_expert": False,
    "runs_policy_code": False,
    "render_modes": ["ansi"],
    "render_mode": None,
    "render_fps": 4.0,
    "observation_space": [None, []],
    "action_space": [10, ["Up"]],
}


@given(st.lists(PLAIN, max_size=4), st.integers(1, 50))
def test_messages_arrive_as_they_were_however_they_are_cut(values, size):
    stream = b"".join(protocol.encode(value) for value in values)
    reader = FrameReader(protocol.LIMITS)
    got = [frame for start in range(0, len(stream), size) for frame in reader.feed(stream[start : start + size])]
    assert [protocol.decode(content) for kind, content in got if kind == protocol.JSON] == values


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_frames_or_an_error(data):
    try:
        for kind, content in FrameReader(protocol.LIMITS).feed(data):
            protocol.decode(content) if kind == protocol.JSON else protocol.decode_picture(content)
    except FrameError:
        pass


@pytest.mark.parametrize(
    "content",
    [b"NaN", b"[Infinity]", b"1e999", b'"\\ud800"', b'"\xff"', b"[" * 100_000, b"{", b"9" * 5000, b""],
    ids=["nan", "infinity", "overflow", "surrogate", "utf-8", "deep", "cut", "digits", "empty"],
)
def test_data_that_is_not_plain_or_finite_is_rejected(content):
    with pytest.raises(FrameError):
        protocol.decode(content)


def test_escaped_backslash_before_u_is_not_a_surrogate():
    assert protocol.decode(json.dumps("\\ud800").encode()) == "\\ud800"


def test_frames_beyond_the_limits_are_rejected():
    for header in (b"\x01\xff\xff\xff\xff", b"\x02\xff\xff\xff\xff", b"\x03\x00\x00\x00\x01"):
        with pytest.raises(FrameError):
            FrameReader(protocol.LIMITS).feed(header)


def test_pictures_are_raw_and_of_their_dimensions():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    [(kind, content)] = FrameReader(protocol.LIMITS).feed(protocol.encode_picture(9, pixels))
    number, got = protocol.decode_picture(content)
    assert kind == protocol.PICTURE
    assert number == 9
    assert np.array_equal(got, pixels)
    assert got.flags.writeable
    with pytest.raises(FrameError):
        protocol.decode_picture(content[:-1])
    with pytest.raises(FrameError):
        protocol.encode_picture(1, np.zeros((2, 2, 3)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FrameError):
        protocol.encode_picture(1, np.zeros((4000, 4000, 3), np.uint8))


@pytest.mark.parametrize(
    "value",
    [None, [], ["text"], [1, {}], ["text", []], ["x" * (validation.TEXT_LIMIT + 1), {}]],
    ids=["null", "empty", "short", "number", "list", "long"],
)
def test_invalid_reset_results_are_rejected(value):
    with pytest.raises(EnvContractError):
        validation.check_reset(value)


@pytest.mark.parametrize(
    ("place", "wrong"), [(0, 1), (1, "1"), (1, None), (1, float("nan")), (1, 10**400), (2, 1), (3, None), (4, [])]
)
def test_invalid_step_results_are_rejected(place, wrong):
    value = ["text", 1.0, False, False, {}]
    value[place] = wrong
    with pytest.raises(EnvContractError):
        validation.check_step(value)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("instructions", 1),
        ("max_turns", 0),
        ("max_turns", True),
        ("actions_per_turn", "1"),
        ("tools", [{"name": "look"}]),
        ("concurrency", "os:system"),
        ("deterministic", 1),
        ("render_modes", "ansi"),
        ("render_fps", "fast"),
        ("observation_space", [None]),
        ("action_space", [-1, []]),
        ("action_space", [None, [1]]),
    ],
)
def test_each_field_of_a_description_is_validated(field, wrong):
    assert validation.check_description(dict(DESCRIPTION)).action_space == (10, ("Up",))
    with pytest.raises(EnvContractError):
        validation.check_description({**DESCRIPTION, field: wrong})
    with pytest.raises(EnvContractError):
        validation.check_description({**DESCRIPTION, "more": 1})
