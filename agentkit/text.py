"""Text of unknown origin, made safe to print on a terminal."""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 without tab, newline and CRLF; DEL; C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, embeddings, overrides and isolates
    "\u2028\u2029\ud800-\udfff]"  # line and paragraph separators; lone surrogates, which no stream can encode
)


def printable(text: str) -> str:
    r"""Return ``text`` with every control character but newline and tab replaced by its escape, such as ``\x1b``.

    A terminal then shows the text and does nothing else: no colour, no cursor movement, no title, no reordering.
    Backslashes that are already there stay as they are, so the result is for people to read, not for programs.
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
