"""Programming tasks, and the comparison of outputs.

Invariant: every text that a program can write gets a verdict, in time linear in its length.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ConfigDict, Field

from agentkit.config import Strict

Compare = Literal["tokens", "exact", "float"]
_LONGEST_NUMBER = 400


class Case(Strict):
    """An input and its expected output."""

    model_config = ConfigDict(frozen=True)

    input: str
    output: str


class Task(Strict):
    """A programming task: the fields of one line of a file."""

    model_config = ConfigDict(frozen=True)

    statement: str = Field(min_length=1)
    tests: tuple[Case, ...] = Field(min_length=1)
    """Hidden tests, which decide the reward."""
    examples: tuple[Case, ...] = ()
    """Public examples, shown with the statement."""
    compare: Compare = "tokens"
    tolerance: float = Field(default=1e-6, gt=0)
    """For ``float``: the largest absolute or relative difference from the expected number."""
    solution: str | None = None
    """A program that solves the task, used by the expert."""

    def accepts(self, output: str, expected: str) -> bool:
        """Return whether ``output`` is correct for a test with the output ``expected``.

        ``tokens``: the same words with any separators. ``exact``: the same lines, except for blanks at their ends and
        empty lines at the end. ``float``: like ``tokens``, but two numbers are equal within ``tolerance``.
        """
        if self.compare == "exact":
            return _lines(output) == _lines(expected)
        words, wanted = output.split(), expected.split()
        if self.compare == "tokens":
            return words == wanted
        return len(words) == len(wanted) and all(
            word == want or self._close(word, want) for word, want in zip(words, wanted, strict=True)
        )

    def _close(self, word: str, want: str) -> bool:
        if len(word) > _LONGEST_NUMBER:
            return False
        try:
            value, target = float(word), float(want)
        except ValueError:
            return False
        if not (math.isfinite(value) and math.isfinite(target)):
            return False
        return abs(value - target) <= self.tolerance * max(1.0, abs(target))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
