r"""Forms of answers: ``86 \cdot 13 + 2`` equals 1120, but only repeats the question.

Invariant: only an answer in the given form is parsed, exactly, as a rational number or a polynomial with rational
coefficients. Only the value of one fraction or mixed number is computed, without rounding.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from agentkit.envs.math.verifier import LONGEST

Form = Literal["number", "lowest terms", "expanded"]

Polynomial = dict[frozenset[tuple[str, int]], Fraction]
"""The coefficient of each product of powers; ``{("x", 2), ("y", 1)}`` is ``x^2 y``. No coefficient is 0."""

_SPELLINGS = [
    (re.compile(r"−"), "-"),
    (re.compile(r"\\in(?![A-Za-z])"), "="),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])"), "*"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|text|textbf|mathrm|mathbf)(?![A-Za-z])"), " "),
    (re.compile(r"\\[,;:! ]|[~$&]"), " "),
    (re.compile(r"\\([{}])"), r"\1"),
    (re.compile(r"(?<=[0-9])(?:,|\{,\}|\s)(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\frac\s*([0-9])"), r"\\frac{\1}"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9])"), r"\\frac\1{\2}"),
    (re.compile(r"(?<![0-9.^])([0-9]+)\s*/\s*([0-9]+)(?![0-9.])"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<=[0-9.])\s+(?=[0-9.])"), "_"),  # two numbers, which must not be joined
    (re.compile(r"\s"), ""),
]
_NAME = re.compile(r"^(?:[A-Za-z]+'*(?:\([A-Za-z]\))?|\\frac\{d[A-Za-z]\}\{d[A-Za-z]\})=")
_NUMBER = re.compile(r"([+-]?)(?:([0-9]+)?\\frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}|([0-9]+|[0-9]*\.[0-9]+))")
_FACTOR = r"(?:\\frac\{[0-9]+\}\{[0-9]+\}|[0-9]+(?:\.[0-9]+)?)"
_POWER = r"[A-Za-z](?:\^(?:\{[0-9]+\}|[0-9]))?"
_TERM = rf"(?:{_FACTOR}(?:\*?{_POWER})*|{_POWER}(?:\*?{_POWER})*)"
_SUM = re.compile(rf"[+-]?{_TERM}(?:(?:\+-?|-){_TERM})*")
_PART = re.compile(rf"([+-]*)({_FACTOR})?((?:\*?{_POWER})*)")
_VARIABLE = re.compile(r"([A-Za-z])(?:\^\{?([0-9]+))?")


def value_in_form(answer: str, form: Form) -> Fraction | Polynomial | None:
    """Return the value of an answer in the given form, or None. Values are equal exactly if the answers are.

    ``number``: an integer, a decimal, one fraction of integers or a mixed number. ``lowest terms``: an integer, or one
    reduced fraction with at most one sign and a denominator above 1. ``expanded``: a sum of monomials, each a number
    before powers of variables above 0, with no two of one kind; ``X`` is not ``x``. Brackets around the answer, and ``x
    =`` or another name before it, are allowed.
    """
    if len(answer) > LONGEST:
        return None
    for spelling, plain in _SPELLINGS:
        answer = spelling.sub(plain, answer)
    answer = _bare(_NAME.sub("", _bare(answer)))
    try:
        return _polynomial(answer) if form == "expanded" else _number(answer, lowest_terms=form == "lowest terms")
    except ZeroDivisionError:
        return None


def _bare(text: str) -> str:
    while text[:1] + text[-1:] in ("()", "{}"):
        text = text[1:-1]
    return text


def _number(text: str, *, lowest_terms: bool) -> Fraction | None:
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    sign, whole, above, below, plain = found.groups()
    if plain is not None:
        size = None if lowest_terms and "." in plain else Fraction(plain)
    elif whole is not None:
        mixed = not lowest_terms and 0 <= int(above) < int(below)
        size = int(whole) + Fraction(int(above), int(below)) if mixed else None
    else:
        reduced = int(below) > 1 and math.gcd(int(above), int(below)) == 1 and not (sign and int(above) < 0)
        size = Fraction(int(above), int(below)) if reduced or not lowest_terms else None
    return size if size is None or sign != "-" else -size


def _polynomial(text: str) -> Polynomial | None:
    if not _SUM.fullmatch(text):
        return None
    terms: Polynomial = {}
    for signs, factor, variables in (part.groups() for part in _PART.finditer(text) if part[0]):
        found = [(letter, int(power or 1)) for letter, power in _VARIABLE.findall(variables)]
        kind = frozenset(found)
        once = len({letter for letter, _ in found}) == len(found)
        if kind in terms or not once or any(power == 0 for _, power in found):
            return None
        size = _number(factor, lowest_terms=False) if factor else Fraction(1)
        assert size is not None
        terms[kind] = -size if "-" in signs else size
    return {kind: size for kind, size in terms.items() if size}
