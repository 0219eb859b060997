"""Frames are decoded exactly as they were encoded, and invalid bytes are errors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import ProtocolError
from agentkit.sandboxes.agent import agent, protocol
from agentkit.sandboxes.agent.protocol import Decoder, Frame, encode, pack, pack_strings, unpack

_fields = st.lists(
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.binary(max_size=50)), max_size=8
)


def _shape(fields) -> str:
    return "".join({int: "i", float: "f", bytes: "b"}[type(field)] for field in fields)


# How long a case takes says only how busy the machine is.
@settings(deadline=None)
@given(_fields)
def test_fields_come_back(fields):
    assert unpack(pack(*fields), _shape(fields)) == tuple(fields)


@settings(deadline=None)
@given(st.binary(max_size=60), st.text("ifb", max_size=6))
def test_arbitrary_bytes_give_fields_or_an_error(payload, shape):
    try:
        fields = unpack(payload, shape)
    except ProtocolError:
        return
    assert _shape(fields) == shape
    assert pack(*fields) == payload


_frames = st.lists(
    st.builds(Frame, st.sampled_from(sorted(protocol.KINDS)), st.integers(0, 2**32 - 1), st.binary(max_size=99))
)


@settings(deadline=None)
@given(_frames, st.data())
def test_frames_come_back_however_they_are_cut(frames, data):
    stream = b"".join(encode(frame.kind, frame.id, frame.payload) for frame in frames)
    decoder, found = Decoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:size])
        stream = stream[size:]
    assert found == frames


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_frames_or_an_error(data):
    try:
        frames = list(Decoder().feed(data))
    except ProtocolError:
        return
    assert sum(len(frame.payload) + 9 for frame in frames) <= len(data)


def test_limits():
    with pytest.raises(ValueError, match="longer than"):
        encode(1, 1, b"x" * (protocol.MAX_PAYLOAD + 1))
    with pytest.raises(ProtocolError, match="at most"):
        list(Decoder().feed((protocol.MAX_PAYLOAD + 1).to_bytes(4, "big") + b"\1\0\0\0\1"))
    with pytest.raises(ProtocolError, match="unknown kind"):
        list(Decoder().feed(b"\0\0\0\0\xff\0\0\0\1"))


def test_strings_end_with_nul():
    assert agent.strings(pack_strings([b"", b"a b", b""])) == [b"", b"a b", b""]
    assert agent.strings(pack_strings([])) == []
    with pytest.raises(ValueError, match="NUL"):
        pack_strings([b"a\0b"])


def test_both_files_name_the_same_numbers():
    for kind in protocol.Kind:
        assert getattr(agent, kind.name) == kind
    for code in protocol.Failure:
        assert getattr(agent, code.name) == code
