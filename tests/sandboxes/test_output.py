"""Truncated output keeps the beginning and the end of a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentkit.sandboxes.output import Capture


@given(st.lists(st.binary(max_size=50)), st.integers(0, 120))
def test_the_beginning_and_the_end_are_kept(chunks: list[bytes], limit: int) -> None:
    capture, whole = Capture(limit), b"".join(chunks)
    for chunk in chunks:
        capture.feed(chunk)
    if len(whole) <= limit:
        assert (capture.value(), capture.truncated) == (whole, False)
    else:
        half = limit // 2
        assert capture.value() == whole[: limit - half] + (whole[-half:] if half else b"")
        assert capture.truncated
