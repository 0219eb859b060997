"""A programming task, and when an output is the expected one.

Invariant: comparing is total: any text that a program wrote gets a verdict, in time linear in its length.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import ConfigDict, Field

from agentkit.config import Strict

Compare = Literal["tokens", "exact", "float"]
_LONGEST_NUMBER = 400


class Case(Strict):
    """One input, and the output that belongs to it."""

    model_config = ConfigDict(frozen=True)

    input: str
    output: str


class Task(Strict):
    """What is to be programmed. A line of a user's file has these fields."""

    model_config = ConfigDict(frozen=True)

    statement: str = Field(min_length=1)
    tests: tuple[Case, ...] = Field(min_length=1)
    """Hidden: they decide the reward."""
    examples: tuple[Case, ...] = ()
    """Public: shown with the statement."""
    compare: Compare = "tokens"
    tolerance: float = Field(default=1e-6, gt=0)
    """For ``float``: the largest difference, absolute or relative to the expected number."""
    solution: str | None = None
    """A program that solves it: the expert."""

    def accepts(self, output: str, expected: str) -> bool:
        """Whether ``output`` answers a test whose output is ``expected``.

        ``tokens``: the same words, however they are separated. ``exact``: the same lines, but for blanks at their ends
        and empty lines at the end. ``float``: like ``tokens``, but two numbers are the same within ``tolerance``.
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
