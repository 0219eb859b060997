"""Families of small programming tasks with random parameters, each with a program that solves it.

Invariant: expected outputs are those of the reference program, which is part of agentkit; no code of a model runs here.
The text of a task depends only on its parameters, the inputs only on the generator.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from agentkit.envs.code_contest.task import Case, Compare, Task
from agentkit.envs.task_files import Split, part_of

EXAMPLES, TESTS = 2, 8


@dataclass(frozen=True)
class Family:
    """One family of tasks with parameters ``{a}``, ``{b}``, where ``1 <= a <= a_max`` and so on."""

    statement: str
    solve: str
    """Body of ``solve(text)``, which returns the output."""
    input: Callable[[np.random.Generator, int], str]
    """Draws an input, given the generator and the number of the input; the first ones are small."""
    a_max: int = 1
    b_max: int = 1
    compare: Compare = "tokens"


def draw(rng: np.random.Generator, split: Split | None) -> Task:
    """Draw a task of any family in ``split``."""
    while True:
        family = FAMILIES[int(rng.integers(len(FAMILIES)))]
        values = {"a": int(rng.integers(1, family.a_max + 1)), "b": int(rng.integers(1, family.b_max + 1))}
        statement = _filled(family.statement, values)
        if split is None or part_of(statement) == split:
            break
    program = _program(_filled(family.solve, values))
    names: dict[str, Callable[[str], object]] = {}
    exec(compile(program.rpartition("\n\n\n")[0], "<reference>", "exec"), names)
    cases = []
    for number in range(EXAMPLES + TESTS):
        text = family.input(rng, number)
        cases.append(Case(input=text, output=f"{names['solve'](text)}\n"))
    return Task(
        statement=statement,
        examples=tuple(cases[:EXAMPLES]),
        tests=tuple(cases[EXAMPLES:]),
        compare=family.compare,
        solution=program,
    )


def _filled(text: str, values: dict[str, int]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return textwrap.dedent(text).strip()


def _program(body: str) -> str:
    solve = textwrap.indent(body, "    ")
    return f"import sys\n\n\ndef solve(text):\n{solve}\n\n\nprint(solve(sys.stdin.read()))\n"


def _integers(rng: np.random.Generator, number: int, low: int = -99, high: int = 99) -> str:
    count = int(rng.integers(1, 6 if number < EXAMPLES else 60))
    return f"{count}\n{' '.join(map(str, rng.integers(low, high + 1, count).tolist()))}\n"


def _positive(rng: np.random.Generator, number: int) -> str:
    return _integers(rng, number, 1, 200)


def _word(rng: np.random.Generator, number: int, alphabet: str = "abcde") -> str:
    count = int(rng.integers(1, 9 if number < EXAMPLES else 80))
    return "".join(alphabet[k] for k in rng.integers(len(alphabet), size=count).tolist()) + "\n"


def _brackets(rng: np.random.Generator, number: int) -> str:
    """Draw a string of brackets: half of them balanced, most others nearly balanced."""
    text, open_ = "", []
    for _ in range(int(rng.integers(1, 5 if number < EXAMPLES else 30))):
        if open_ and rng.random() < 0.5:
            text += open_.pop()
        else:
            kind = int(rng.integers(3))
            text += "([{"[kind]
            open_.append(")]}"[kind])
    text += "".join(reversed(open_))
    if rng.random() < 0.5:
        spot = int(rng.integers(len(text)))
        text = text[:spot] + ")]}(["[int(rng.integers(5))] + text[spot + 1 :]
    return text + "\n"


def _sentence(rng: np.random.Generator, number: int) -> str:
    words = ["ash", "bay", "cod", "dew", "elm", "fig", "gum", "hop"]
    count = int(rng.integers(1, 6 if number < EXAMPLES else 50))
    return " ".join(words[k] for k in rng.integers(len(words), size=count).tolist()) + "\n"


def _matrix(rng: np.random.Generator, number: int) -> str:
    rows, columns = (int(size) for size in rng.integers(1, 4 if number < EXAMPLES else 9, 2))
    lines = [" ".join(map(str, row)) for row in rng.integers(-20, 21, (rows, columns)).tolist()]
    return f"{rows} {columns}\n" + "\n".join(lines) + "\n"


def _single(low: int, high: int) -> Callable[[np.random.Generator, int], str]:
    return lambda rng, number: f"{int(rng.integers(low, min(20, high) if number < EXAMPLES else high + 1))}\n"


_LIST = "The first line holds a number n, the second n integers."

FAMILIES = (
    Family(
        f"{_LIST} Print the sum of those that are divisible by {{a}} and greater than {{b}}.",
        "numbers = map(int, text.split()[1:])\nreturn sum(x for x in numbers if x % {a} == 0 and x > {b})",
        _integers,
        a_max=9,
        b_max=20,
    ),
    Family(
        f"{_LIST} Print the {{a}}-th largest of the different values, counted from 1, or -{{b}} if there are fewer.",
        "values = sorted(set(map(int, text.split()[1:])), reverse=True)\n"
        "return values[{a} - 1] if len(values) >= {a} else -{b}",
        _integers,
        a_max=6,
        b_max=9,
    ),
    Family(
        f"{_LIST} Print the largest sum of consecutive integers, at least {{a}} of them, or NONE if there are fewer.",
        "numbers = list(map(int, text.split()[1:]))\n"
        "ends = range({a}, len(numbers) + 1)\n"
        "sums = [sum(numbers[start:end]) for end in ends for start in range(end - {a} + 1)]\n"
        "return max(sums) if sums else 'NONE'",
        _integers,
        a_max=9,
    ),
    Family(
        f"{_LIST} Print their mean after each integer was multiplied by {{a}} and {{b}} was added, as a decimal "
        "number. A difference of 0.000001 is allowed.",
        "numbers = list(map(int, text.split()[1:]))\nreturn sum({a} * x + {b} for x in numbers) / len(numbers)",
        _integers,
        a_max=9,
        b_max=20,
        compare="float",
    ),
    Family(
        f"{_LIST} All are positive. Print their least common multiple modulo {{a}}000{{b}}.",
        "import math\nreturn math.lcm(*map(int, text.split()[1:])) % {a}000{b}",
        _positive,
        a_max=9,
        b_max=9,
    ),
    Family(
        "A line holds a word of small letters. Replace each letter by the one {a} places later in the alphabet (after "
        "z comes a), then remove every letter at a position divisible by {b}1, counted from 1. Print what is left.",
        "moved = [chr((ord(c) - 97 + {a}) % 26 + 97) for c in text.strip()]\n"
        "return ''.join(c for k, c in enumerate(moved, 1) if k % {b}1)",
        _word,
        a_max=25,
        b_max=3,
    ),
    Family(
        "A line holds a word. Find its longest run of one letter (the first, if several are as long) and print the "
        "letter and the run's length plus {a}, separated by a space.",
        "import itertools\n"
        "runs = [(len(list(group)), letter) for letter, group in itertools.groupby(text.strip())]\n"
        "length, letter = max(runs, key=lambda run: run[0])\n"
        "return f'{letter} {length + {a}}'",
        _word,
        a_max=50,
    ),
    Family(
        "A line holds brackets of the kinds ( ) [ ] { }. If they are balanced, print the number of pairs times {a}; "
        "otherwise print the position, counted from {b}, of the first bracket that closes nothing of its kind, or OPEN "
        "if there is none.",
        "stack = []\n"
        "for place, c in enumerate(text.strip()):\n"
        "    if c in '([{':\n"
        "        stack.append(')]}'['([{'.index(c)])\n"
        "    elif not stack or stack.pop() != c:\n"
        "        return place + {b}\n"
        "return 'OPEN' if stack else len(text.strip()) // 2 * {a}",
        _brackets,
        a_max=9,
        b_max=5,
    ),
    Family(
        "A line holds words. Print those that occur at least {a} times, each once, sorted by the alphabet, one a line; "
        "if there are none, print the number of words plus {b}.",
        "from collections import Counter\n"
        "words = text.split()\n"
        "often = sorted(word for word, count in Counter(words).items() if count >= {a})\n"
        "return '\\n'.join(often) if often else len(words) + {b}",
        _sentence,
        a_max=6,
        b_max=9,
        compare="exact",
    ),
    Family(
        "The first line holds the numbers of rows and columns of a matrix, the following lines its rows. Print the "
        "largest sum of a row plus {a} times the smallest sum of a column.",
        "lines = text.splitlines()[1:]\n"
        "rows = [list(map(int, line.split())) for line in lines]\n"
        "return max(map(sum, rows)) + {a} * min(map(sum, zip(*rows)))",
        _matrix,
        a_max=50,
    ),
    Family(
        "A line holds an amount. In how many ways can it be paid with coins of 1, {a}2 and {b}5, if the order does not "
        "matter?",
        "amount = int(text)\n"
        "ways = [1] + [0] * amount\n"
        "for coin in (1, {a}2, {b}5):\n"
        "    for value in range(coin, amount + 1):\n"
        "        ways[value] += ways[value - coin]\n"
        "return ways[amount]",
        _single(0, 400),
        a_max=5,
        b_max=5,
    ),
    Family(
        "A line holds a number n. Print how many of the integers from 1 to n have digits whose sum is divisible by "
        "{a}, not counting those that end with the digit {b}.",
        "return sum(sum(map(int, str(k))) % {a} == 0 and k % 10 != {b} for k in range(1, int(text) + 1))",
        _single(1, 20_000),
        a_max=12,
        b_max=9,
    ),
)
