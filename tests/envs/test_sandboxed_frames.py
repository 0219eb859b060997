"""What a sandboxed environment says is read strictly: every hostile byte is an error, and nothing else happens."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs import answers, frames
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
    stream = b"".join(frames.message(value) for value in values)
    unpacker = frames.Unpacker()
    got = [frame for start in range(0, len(stream), size) for frame in unpacker.feed(stream[start : start + size])]
    assert [frames.parsed(content) for kind, content in got if kind == frames.JSON] == values


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_an_error(data):
    try:
        for kind, content in frames.Unpacker().feed(data):
            frames.parsed(content) if kind == frames.JSON else frames.pictured(content)
    except frames.FrameError:
        pass


@pytest.mark.parametrize(
    "content",
    [b"NaN", b"[Infinity]", b"1e999", b'"\\ud800"', b'"\xff"', b"[" * 100_000, b"{", b"9" * 5000, b""],
    ids=["nan", "infinity", "overflow", "surrogate", "utf-8", "deep", "cut", "digits", "empty"],
)
def test_what_is_no_plain_finite_data_is_refused(content):
    with pytest.raises(frames.FrameError):
        frames.parsed(content)


def test_a_backslash_before_a_u_is_no_surrogate():
    assert frames.parsed(json.dumps("\\ud800").encode()) == "\\ud800"


def test_lengths_are_believed_only_within_bounds():
    for header in (b"\x01\xff\xff\xff\xff", b"\x02\xff\xff\xff\xff", b"\x03\x00\x00\x00\x01"):
        with pytest.raises(frames.FrameError):
            frames.Unpacker().feed(header)


def test_pictures_are_raw_and_of_their_dimensions():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    [(kind, content)] = frames.Unpacker().feed(frames.picture(9, pixels))
    number, got = frames.pictured(content)
    assert kind == frames.PICTURE
    assert number == 9
    assert np.array_equal(got, pixels)
    assert got.flags.writeable
    with pytest.raises(frames.FrameError):
        frames.pictured(content[:-1])
    with pytest.raises(frames.FrameError):
        frames.picture(1, np.zeros((2, 2, 3)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(frames.FrameError):
        frames.picture(1, np.zeros((4000, 4000, 3), np.uint8))


@pytest.mark.parametrize(
    "value",
    [None, [], ["text"], [1, {}], ["text", []], ["x" * (answers.TEXT_LIMIT + 1), {}]],
    ids=["null", "empty", "short", "number", "list", "long"],
)
def test_a_reset_that_is_none_is_refused(value):
    with pytest.raises(EnvContractError):
        answers.check_reset(value)


@pytest.mark.parametrize(
    ("place", "wrong"), [(0, 1), (1, "1"), (1, None), (1, float("nan")), (1, 10**400), (2, 1), (3, None), (4, [])]
)
def test_a_step_that_is_none_is_refused(place, wrong):
    value = ["text", 1.0, False, False, {}]
    value[place] = wrong
    with pytest.raises(EnvContractError):
        answers.check_step(value)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("instructions", 1),
        ("max_turns", 0),
        ("max_turns", True),
        ("actions_per_turn", "1"),
        ("concurrency", "os:system"),
        ("deterministic", 1),
        ("render_modes", "ansi"),
        ("render_fps", "fast"),
        ("observation_space", [None]),
        ("action_space", [-1, []]),
        ("action_space", [None, [1]]),
    ],
)
def test_a_description_is_believed_field_by_field(field, wrong):
    assert answers.check_description(dict(DESCRIPTION)).action_space == (10, ("Up",))
    with pytest.raises(EnvContractError):
        answers.check_description({**DESCRIPTION, field: wrong})
    with pytest.raises(EnvContractError):
        answers.check_description({**DESCRIPTION, "more": 1})
