"""Countdown tasks: draw, check and solve.

Invariant: every drawn task has a solution, because its target is computed from its numbers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from agentkit.envs.countdown.expression import Expression

Split = Literal["train", "test"]
TEST_SHARE = 0.2
"""Fraction of all tasks in ``split="test"``, which are never trained on."""


@dataclass(frozen=True)
class Task:
    """A task: combine all numbers, each once, with + - * / into the target."""

    numbers: tuple[int, ...]
    target: int

    @property
    def split(self) -> Split:
        """The part of the task; the order of its numbers does not matter."""
        text = f"{sorted(self.numbers)}={self.target}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"

    def solved_by(self, expression: Expression) -> bool:
        """Return whether an expression uses exactly the task's numbers and equals the target exactly."""
        return expression.value == self.target and Counter(expression.numbers) == Counter(self.numbers)


def draw(count: int, max_number: int, max_target: int, rng: np.random.Generator, split: Split | None = None) -> Task:
    """Draw numbers in 1..``max_number``, combine them at random, and use the result as the target.

    Raises:
        ValueError: no task with a target in 1..``max_target`` was found in 10,000 draws.
    """
    for _ in range(10_000):
        # One draw for a whole attempt: the numbers, then a pair and an operation for each combination.
        draws = rng.random(count + 3 * (count - 1)).tolist()
        numbers = tuple(1 + int(draw * max_number) for draw in draws[:count])
        target = _combine(list(numbers), draws[count:])
        if target is not None and 1 <= target <= max_target:
            task = Task(numbers, target)
            if split is None or task.split == split:
                return task
    raise ValueError(
        f"found no task with numbers={count}, max_number={max_number}, max_target={max_target}, split={split} in "
        "10,000 draws; raise max_target"
    )


def _combine(values: list[int], draws: list[float]) -> int | None:
    """Combine the values pair by pair with random operations; None if a quotient is not an integer."""
    for k in range(0, len(draws), 3):
        left = values.pop(int(draws[k] * len(values)))
        right = values.pop(int(draws[k + 1] * len(values)))
        operation = int(draws[k + 2] * 4)
        if operation == 0:
            values.append(left + right)
        elif operation == 1:
            values.append(left - right)
        elif operation == 2:
            values.append(left * right)
        elif right != 0 and left % right == 0:
            values.append(left // right)
        else:
            return None
    return values[0]


@dataclass(frozen=True)
class _Term:
    """A value, its text, and the precedence of the text: 1 a sum, 2 a product, 3 an atom."""

    value: Fraction
    text: str
    binding: int = 3

    def within(self, binding: int) -> str:
        return self.text if self.binding >= binding else f"({self.text})"


def solve(task: Task) -> str | None:
    """Return an expression that solves the task, or None; tries every order, operation and bracketing."""
    return _solve([_Term(Fraction(number), str(number)) for number in task.numbers], Fraction(task.target), set())


def _solve(terms: list[_Term], target: Fraction, hopeless: set[tuple[Fraction, ...]]) -> str | None:
    if len(terms) == 1:
        return terms[0].text if terms[0].value == target else None
    state = tuple(sorted(term.value for term in terms))
    if state in hopeless:
        return None
    for i, left in enumerate(terms):
        for j in range(i):
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for joined in _joined(left, terms[j]):
                found = _solve([*rest, joined], target, hopeless)
                if found is not None:
                    return found
    hopeless.add(state)
    return None


def _joined(a: _Term, b: _Term) -> Iterator[_Term]:
    """Yield all terms that combine two terms."""
    yield _Term(a.value + b.value, f"{a.within(1)} + {b.within(1)}", 1)
    yield _Term(a.value * b.value, f"{a.within(2)} * {b.within(2)}", 2)
    for left, right in ((a, b), (b, a)):
        yield _Term(left.value - right.value, f"{left.within(1)} - {right.within(2)}", 1)
        if right.value != 0:
            yield _Term(left.value / right.value, f"{left.within(2)} / {right.within(3)}", 2)
