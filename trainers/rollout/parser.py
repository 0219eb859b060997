"""Conversion of a model's text to environment actions, and back.

Invariant: ``parse(format(actions))`` gives ``actions``, and an answer with an invalid format has no actions. The
environment, not the parser, checks whether an action exists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

SEPARATOR = "||"
"""Separator of the actions of one answer."""

_OPEN, _CLOSE = "<answer>", "</answer>"
# A sign after a letter, a digit or a point is an operator or a hyphen. Commas separate groups of three digits.
_NUMBER = re.compile(r"(?<![\w.])[-−]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A parsed answer: its actions in order; empty if the format is invalid."""

    actions: tuple[str, ...]
    valid: bool
    problem: str = ""
    """Why the format is invalid, for the model; empty: the parser's instructions say it."""


_INVALID = ParsedAnswer((), valid=False)


class AnswerParser(Protocol):
    """What the rollout loop needs of a parser."""

    @property
    def instructions(self) -> str:
        """The answer format, for the system message."""
        ...

    def parse(self, text: str) -> ParsedAnswer:
        """Return the answer in ``text``, which the model wrote: it may be anything."""
        ...

    def format(self, actions: Sequence[str]) -> str:
        """Return an answer that ``parse`` reads as ``actions``. Raises ``ValueError`` if none exists."""
        ...


class ActionParser:
    """Parser of one answer format.

    ``tagged``: the last ``<answer>…</answer>`` of the text holds the actions, separated by ``||`` where there may be
    several; anything may precede it (reasoning, say). ``plain``: the whole text, stripped, is one action.
    """

    def __init__(self, kind: Literal["tagged", "plain"], actions_per_turn: int = 1) -> None:
        if actions_per_turn < 1:
            raise ValueError(f"actions_per_turn={actions_per_turn}: an answer holds at least one action")
        self.kind: Literal["tagged", "plain"] = kind
        self.actions_per_turn = actions_per_turn if kind == "tagged" else 1

    @property
    def instructions(self) -> str:
        """The answer format, for the system message."""
        if self.kind == "plain":
            return "Answer with your next action and nothing else."
        if self.actions_per_turn == 1:
            return f"End your answer with your next action inside tags: {_OPEN}action{_CLOSE}"
        return (
            f"End your answer with your next actions (at most {self.actions_per_turn}) inside tags, separated by "
            f"{SEPARATOR}: {_OPEN}first {SEPARATOR} second{_CLOSE}"
        )

    def parse(self, text: str) -> ParsedAnswer:
        """Return the answer in ``text``. Too many actions, an empty action, or no closed tag make the format
        invalid."""
        if self.kind == "plain":
            action = text.strip()
            return ParsedAnswer((action,), valid=True) if action else _INVALID
        start = text.rfind(_OPEN)
        end = text.find(_CLOSE, start) if start >= 0 else -1
        if end < 0:
            return _INVALID
        inside = text[start + len(_OPEN) : end]
        # A single action may contain the separator, which is an operator in shells and programs.
        parts = [inside] if self.actions_per_turn == 1 else inside.split(SEPARATOR)
        actions = tuple(part.strip() for part in parts)
        if len(actions) > self.actions_per_turn or not all(actions):
            return _INVALID
        return ParsedAnswer(actions, valid=True)

    def format(self, actions: Sequence[str]) -> str:
        """Return the canonical answer text for ``actions``, the target of imitation. Raises ``ValueError`` if none
        exists."""
        actions = tuple(actions)
        if self.kind == "plain":
            text = actions[0] if len(actions) == 1 else ""
        else:
            text = f"{_OPEN}{f' {SEPARATOR} '.join(actions)}{_CLOSE}"
        if self.parse(text) != ParsedAnswer(actions, valid=True):
            raise ValueError(
                f"no {self.kind} answer of at most {self.actions_per_turn} action(s) reads back as {list(actions)}: "
                "there are too many or too few, or one is empty, padded with spaces, or holds a tag or the separator"
            )
        return text


class NumberParser:
    """Parser that takes the last number of the text as the action, as is usual for arithmetic with models that have not
    learned a format. The action is in plain digits: ``"1,234"`` becomes ``"1234"``."""

    instructions = "End your answer with the number."

    def parse(self, text: str) -> ParsedAnswer:
        """Return the last number in ``text``; the format is invalid without a number."""
        numbers = _NUMBER.findall(text)
        return ParsedAnswer((numbers[-1].replace(",", "").replace("−", "-"),), valid=True) if numbers else _INVALID

    def format(self, actions: Sequence[str]) -> str:
        """Return ``actions``, one number, as the answer. Raises ``ValueError`` if it is none."""
        text = actions[0] if len(actions) == 1 else ""
        if self.parse(text) != ParsedAnswer(tuple(actions), valid=True):
            raise ValueError(f"no answer with one number reads back as {list(actions)}: actions are numbers in digits")
        return text
