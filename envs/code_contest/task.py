"""Programming tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from agentkit.config import Strict
from agentkit.envs.code_contest.judge import accepts

Compare = Literal["tokens", "exact", "float"]


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
        """Return whether ``output`` is correct for a test with the output ``expected``; see ``judge.accepts``."""
        return accepts(output, expected, self.compare, self.tolerance)
