"""Parser of arithmetic expressions that a model wrote; never executes them.

Invariant: a text is either evaluated exactly (``Fraction``) or rejected with ``ExpressionError``, in time bounded by
the limits below; it never reaches ``eval``, ``int`` of a long digit string, or deep recursion.

Grammar::

    sum     = product (("+" | "-") product)*
    product = atom (("*" | "/") atom)*
    atom    = digits | "(" sum ")"
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200
MAX_DIGITS = 6
MAX_DEPTH = 20
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})
_TOKEN = re.compile(r"[ \t]*([0-9]+|[-+*/()])", re.ASCII)


class ExpressionError(ValueError):
    """The text is not an expression of the grammar, is too large, or divides by zero."""


@dataclass(frozen=True)
class Expression:
    """The value of an expression, and the numbers in it in order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Expression:
    """Evaluate ``text`` exactly.

    Raises:
        ExpressionError: the text is invalid; the message gives the reason and the position.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"the expression has {len(text)} characters; {MAX_LENGTH} are allowed")
    reader = _Reader(_tokens(text.translate(_SPELLINGS)))
    value = reader.sum(0)
    if reader.position < len(reader.tokens):
        raise ExpressionError(f"{reader.peek()!r} does not belong there (token {reader.position + 1})")
    return Expression(value, tuple(reader.numbers))


def _tokens(text: str) -> list[str]:
    tokens = []
    position, end = 0, len(text.rstrip(" \t\n"))
    while position < end:
        match = _TOKEN.match(text, position, end)
        if match is None:
            raise ExpressionError(f"{text[position:].lstrip()[:1]!r} is neither a number nor one of + - * / ( )")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Reader:
    """Recursive-descent parser with one method per rule."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def peek(self) -> str:
        """Return the next token, or an empty text at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            value = value + self.product(depth) if self.take() == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.atom(depth)
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value *= self.atom(depth)
                continue
            divisor = self.atom(depth)
            if divisor == 0:
                raise ExpressionError("division by zero")
            value /= divisor
        return value

    def atom(self, depth: int) -> Fraction:
        token = self.take()
        if token == "(":
            if depth >= MAX_DEPTH:
                raise ExpressionError(f"parentheses are nested more than {MAX_DEPTH} deep")
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if not token.isdigit():
            where = f"{token!r} stands" if token else "the expression ends"
            raise ExpressionError(f"{where} where a number or '(' belongs")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number has {len(token)} digits; {MAX_DIGITS} are allowed")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])
