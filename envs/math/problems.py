"""Random mathematical problems with known answers.

Invariant: an answer is computed exactly from the numbers of the problem and written in LaTeX, without a computer
algebra system.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from agentkit.config import Strict
from agentkit.envs.math.answer_forms import Form, value_in_form
from agentkit.envs.task_files import Split, part_of


class Problem(Strict):
    """A problem and its answer: the fields of one line of a file."""

    model_config = ConfigDict(frozen=True)

    problem: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    """In LaTeX."""
    topic: str = "problem"
    """Successes are counted by topic."""
    form: Form | None = None
    """The form that an answer must have; None accepts any form."""

    @model_validator(mode="after")
    def _answer_has_the_form(self) -> Problem:
        if self.form is not None and value_in_form(self.answer, self.form) is None:
            raise ValueError(f"the answer {self.answer!r} is not of the form {self.form!r}")
        return self


Draw = Callable[[Callable[[int, int], int]], tuple[str, str]]
"""Takes ``integer(low, high)``, which includes both bounds; returns the problem and its answer."""


def draw(rng: np.random.Generator, split: Split | None) -> Problem:
    """Draw a problem of any topic in ``split``."""

    def integer(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    while True:
        topic, form, make = KINDS[integer(0, len(KINDS) - 1)]
        text, answer = make(integer)
        if split is None or part_of(text) == split:
            return Problem(problem=text, answer=answer, topic=topic, form=form)


def number(value: Fraction | int) -> str:
    """Return a rational number in LaTeX."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def polynomial(coefficients: list[int]) -> str:
    """Return a polynomial in x in LaTeX; the coefficients start with the constant."""
    text = ""
    for power in range(len(coefficients) - 1, -1, -1):
        factor = coefficients[power]
        if factor == 0:
            continue
        variable = ("", "x")[power] if power < 2 else f"x^{{{power}}}"
        size = str(abs(factor)) if abs(factor) != 1 or not power else ""
        sign = "-" if factor < 0 else "+"
        text += (f" {sign} " if text else sign.replace("+", "")) + size + variable
    return text or "0"


def _sum(integer: Callable[[int, int], int]) -> tuple[str, str]:
    a, b, c = integer(11, 99), integer(2, 19), integer(-99, 99)
    return f"Compute ${a} \\cdot {b} {c:+d}$.", number(a * b + c)


def _fractions(integer: Callable[[int, int], int]) -> tuple[str, str]:
    a, b, c, d = integer(1, 20), integer(2, 20), integer(1, 20), integer(2, 20)
    text = f"Compute $\\frac{{{a}}}{{{b}}} - \\frac{{{c}}}{{{d}}}$ as a fraction in lowest terms."
    return text, number(Fraction(a, b) - Fraction(c, d))


def _linear(integer: Callable[[int, int], int]) -> tuple[str, str]:
    a, b, c = integer(2, 15), integer(-30, 30), integer(-30, 30)
    return f"Solve ${polynomial([b, a])} = {c}$ for $x$.", number(Fraction(c - b, a))


def _system(integer: Callable[[int, int], int]) -> tuple[str, str]:
    x, y, a, b = integer(-12, 12), integer(-12, 12), integer(2, 7), integer(2, 7)
    return f"If ${a}x + y = {a * x + y}$ and $x - {b}y = {x - b * y}$, what is $xy$?", number(x * y)


def _expand(integer: Callable[[int, int], int]) -> tuple[str, str]:
    a, b, c = integer(1, 5), integer(-9, 9), integer(-9, 9)
    text = f"Expand $({polynomial([b, a])})({polynomial([c, 1])})$."
    return text, polynomial([b * c, a * c + b, a])


def _roots(integer: Callable[[int, int], int]) -> tuple[str, str]:
    first = integer(-12, 12)
    second = first + integer(1, 12)
    text = f"What is the larger solution of ${polynomial([first * second, -first - second, 1])} = 0$?"
    return text, number(second)


def _common(integer: Callable[[int, int], int]) -> tuple[str, str]:
    factor = integer(2, 30)
    a, b = factor * integer(2, 20), factor * integer(2, 20)
    return f"What is the greatest common divisor of {a} and {b}?", number(math.gcd(a, b))


def _remainder(integer: Callable[[int, int], int]) -> tuple[str, str]:
    a, n, m = integer(2, 20), integer(5, 60), integer(3, 40)
    return f"What is the remainder when ${a}^{{{n}}}$ is divided by {m}?", number(pow(a, n, m))


def _divisors(integer: Callable[[int, int], int]) -> tuple[str, str]:
    n = integer(20, 600)
    return f"How many positive divisors does {n} have?", number(sum(n % k == 0 for k in range(1, n + 1)))


def _derivative(integer: Callable[[int, int], int]) -> tuple[str, str]:
    factors = [integer(-9, 9) for _ in range(3)] + [integer(1, 9)]
    slopes = [power * factor for power, factor in enumerate(factors)][1:]
    return f"Differentiate ${polynomial(factors)}$ with respect to $x$.", polynomial(slopes)


def _integral(integer: Callable[[int, int], int]) -> tuple[str, str]:
    factors = [integer(-9, 9), integer(-9, 9), integer(1, 9)]
    low = integer(-3, 3)
    high = low + integer(1, 4)
    area = sum(
        Fraction(factor * (high ** (power + 1) - low ** (power + 1)), power + 1) for power, factor in enumerate(factors)
    )
    return f"Compute $\\int_{{{low}}}^{{{high}}} ({polynomial(factors)}) \\, dx$.", number(area)


KINDS: tuple[tuple[str, Form, Draw], ...] = (
    ("arithmetic", "number", _sum),
    ("arithmetic", "lowest terms", _fractions),
    ("algebra", "number", _linear),
    ("algebra", "number", _system),
    ("algebra", "expanded", _expand),
    ("algebra", "number", _roots),
    ("number_theory", "number", _common),
    ("number_theory", "number", _remainder),
    ("number_theory", "number", _divisors),
    ("calculus", "expanded", _derivative),
    ("calculus", "number", _integral),
)
