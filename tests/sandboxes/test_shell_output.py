"""The output of a shell is split at the right places, independent of its timing and pieces."""

from __future__ import annotations

import pytest

from agentkit.sandboxes.shell import _Output

FIRST, ASKED, SECOND, THIRD = (letter * 32 for letter in "abcd")


def mark(nonce: str, status: int = 0) -> bytes:
    return f"\x1e{nonce}:{status}\x1e".encode()


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("answers", [1, 2, 4])
@pytest.mark.parametrize("own", [b"", mark(FIRST, 130)], ids=["line abandoned", "line ended"])
def test_late_marks_of_an_interrupted_shell_are_ignored(piece: int, answers: int, own: bytes) -> None:
    """The host asked the shell ``answers`` times whether it is ready, and the shell answers each time."""
    late = mark(ASKED) * (answers - 1)
    for before in range(len(late) + 1):  # bytes that arrive before the next command begins
        output = _Output()
        output.expect(100, FIRST)
        output.feed(b"early\n")
        output.expect_also(ASKED)
        _feed(output, own + mark(ASKED) + late[:before], piece)
        assert output.complete.is_set()
        assert output.take() == (b"early\n", False)

        output.expect(100, SECOND)
        assert not output.complete.is_set()
        _feed(output, late[before:] + b"on\n" + mark(SECOND, 7), piece)
        assert output.complete.is_set()
        assert (output.take(), output.status) == ((b"on\n", False), 7)

        output.expect(100, THIRD)
        _feed(output, b"after\n" + mark(THIRD), piece)
        assert (output.take(), output.status) == ((b"after\n", False), 0)


def test_an_interrupted_command_after_an_interrupted_one() -> None:
    output = _Output()
    output.expect(100, FIRST)
    output.expect_also(ASKED)
    output.feed(mark(ASKED))
    output.expect(100, SECOND)
    output.feed(b"x" + mark(ASKED) + b"y")
    output.expect_also(THIRD)
    output.feed(mark(ASKED) + mark(THIRD, 1))
    assert (output.take(), output.status) == ((b"xy", False), 1)


def test_an_unknown_mark_is_output() -> None:
    output = _Output()
    output.expect(1000, FIRST)
    output.feed(mark(SECOND) + mark(FIRST))
    assert output.take() == (mark(SECOND), False)


def _feed(output: _Output, data: bytes, piece: int) -> None:
    for start in range(0, len(data), piece):
        output.feed(data[start : start + piece])
