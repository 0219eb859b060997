"""Control characters in the output of a sandbox or a policy have no effect on a terminal."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs.isolation.process import RemoteTraceback
from agentkit.errors import AgentkitError, EnvCrashed, ExecFailed
from agentkit.text import printable

CLEAR = "\x1b[2J\x1b[H"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode 日本 \\x1b", "plain, ünïcode 日本 \\x1b"),
        ("tab\tand\nlines\r\n", "tab\tand\nlines\r\n"),
        ("ok\rgone", "ok\\x0dgone"),
        (CLEAR, "\\x1b[2J\\x1b[H"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\x08\x7f\x00", "a\\x08\\x7f\\x00"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\udc9b", "\\udc9b"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None)))
def test_any_text(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert printable(shown) == shown
    assert all(letter in "\t\n\r" or unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp") for letter in shown)
    assert not any(unicodedata.bidirectional(letter) in ("RLO", "LRO", "RLE", "LRE", "RLI", "LRI") for letter in shown)


def test_messages_of_errors_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    for error in (AgentkitError(CLEAR), EnvCrashed(f"it said: {CLEAR}"), ExecFailed(CLEAR, log_tail=CLEAR)):
        assert "\x1b" not in str(error)
        logging.getLogger("agentkit").warning("failed: %s", error)
    assert "\x1b" not in caplog.text
    assert "\x1b" not in str(RemoteTraceback(CLEAR))
