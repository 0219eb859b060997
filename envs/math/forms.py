r"""The form that an answer has beside its value: ``86 \cdot 13 + 2`` equals 1120, but copies the question.

Invariant: only the text decides, nothing is computed, and what is returned is what was looked at: nothing else can be
compared instead. Whatever is not a spelling of the form, is not of the form.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from agentkit.envs.math.verifier import LONGEST

Form = Literal["number", "lowest terms", "expanded"]

_SPELLINGS = [
    (re.compile(r"−"), "-"),
    (re.compile(r"\\in(?![A-Za-z])"), "="),
    (re.compile(r"\\(?:cdot|times)(?![A-Za-z])"), "*"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|text|textbf|mathrm|mathbf)(?![A-Za-z])"), ""),
    (re.compile(r"\\[,;:! ]|[\s~$&]"), ""),
    (re.compile(r"\\([{}])"), r"\1"),
    (re.compile(r"(?<=[0-9])(?:,|\{,\})(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\frac([0-9])"), r"\\frac{\1}"),
    (re.compile(r"\\frac(\{[^{}]*\})([0-9])"), r"\\frac\1{\2}"),
    (re.compile(r"(?<![0-9.^])([0-9]+)/([0-9]+)(?![0-9.])"), r"\\frac{\1}{\2}"),
]
_NAME = re.compile(r"^(?:[A-Za-z]+'*(?:\([A-Za-z]\))?|\\frac\{d[A-Za-z]\}\{d[A-Za-z]\})=")
_NUMBER = re.compile(r"[+-]?(?:([0-9]+)?\\frac\{(-?[0-9]+)\}\{(-?[0-9]+)\}|[0-9]+|([0-9]*\.[0-9]+))")
_FACTOR = r"(?:\\frac\{[0-9]+\}\{[0-9]+\}|[0-9]+(?:\.[0-9]+)?)"
_POWER = r"[A-Za-z](?:\^(?:\{[0-9]+\}|[0-9]))?"
_TERM = rf"(?:{_FACTOR}(?:\*?{_POWER})*|{_POWER}(?:\*?{_POWER})*)"
_SUM = re.compile(rf"[+-]?{_TERM}(?:(?:\+-?|-){_TERM})*")
_SIGNS = re.compile(r"[+-]+")
_VARIABLE = re.compile(r"([A-Za-z])(?:\^\{?([0-9]+))?")


def in_form(answer: str, form: Form) -> str | None:
    """The expression alone, spelt plainly, if it is of the form; else None.

    ``number``: an integer, a decimal, one fraction of integers or a mixed number. ``lowest terms``: an integer, or such
    a fraction. ``expanded``: a sum of monomials, each a number before powers of variables, and no two of one kind.
    Around it may stand brackets, and ``x =`` or another name before it.
    """
    if len(answer) > LONGEST:
        return None
    for spelling, plain in _SPELLINGS:
        answer = spelling.sub(plain, answer)
    answer = _bare(_NAME.sub("", _bare(answer)))
    if form == "expanded":
        return answer.replace("*", "") if _is_expanded(answer) else None
    return answer if _is_number(answer, lowest_terms=form == "lowest terms") else None


def _bare(text: str) -> str:
    while text[:1] + text[-1:] in ("()", "{}"):
        text = text[1:-1]
    return text


def _is_number(text: str, *, lowest_terms: bool) -> bool:
    found = _NUMBER.fullmatch(text)
    if found is None:
        return False
    whole, above, below, decimal = found.groups()
    if below is None:
        return not (lowest_terms and decimal)
    if whole is not None:
        return not lowest_terms and 0 <= int(above) < int(below)
    return not lowest_terms or math.gcd(int(above), int(below)) == 1


def _is_expanded(text: str) -> bool:
    if not _SUM.fullmatch(text):
        return False
    kinds = set()
    for term in filter(None, _SIGNS.split(text.replace("\\frac", ""))):
        powers = {letter: int(power or 1) for letter, power in _VARIABLE.findall(term)}
        kind = frozenset(powers.items())
        if len(powers) < len(_VARIABLE.findall(term)) or kind in kinds:
            return False
        kinds.add(kind)
    return True
