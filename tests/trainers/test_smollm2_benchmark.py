"""The tables of the SmolLM2 benchmark follow from the recorded answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.smollm2.report import bootstrap, success, table, transcripts
from benchmarks.smollm2.results import Answer, Result


def answers(correct: list[bool], *, each: int = 1) -> list[Answer]:
    """``each`` equal answers per question."""
    return [
        Answer(f"What is {number}?", f"{number}|`x`", True, right)
        for number, right in enumerate(correct)
        for _ in range(each)
    ]


def result(method: str, seed: int, after: list[Answer], **changes) -> Result:
    before = [Answer("What is 0?", "None", False, False), Answer("What is 1?", "2", True, False)]
    given = {"evaluations": {}, "curve": [0.5], "minutes": 1.0, "step_s": 1.0, "peak_bytes": 2_000_000_000} | changes
    return Result(method, seed, before, after, **given)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0.1, 0.9), questions=st.integers(50, 200))
def test_the_interval_of_single_answers_is_that_of_a_proportion(share, questions):
    right = [number < share * questions for number in range(questions)]
    found, low_high = answers(right), bootstrap(answers(right))
    half = 1.96 * np.sqrt(success(found) * (1 - success(found)) / questions)
    assert low_high == pytest.approx((success(found) - half, success(found) + half), abs=0.035)


def test_repeated_questions_add_nothing_to_the_certainty():
    right = [number % 3 == 0 for number in range(60)]
    assert bootstrap(answers(right, each=5)) == bootstrap(answers(right))


def test_table_separates_format_from_correctness():
    results = [result("grpo", seed, answers([True] * (6 + seed) + [False] * (4 - seed))) for seed in range(3)] + [
        result("full", 0, answers([True] * 5 + [False] * 5)),
        result("longer_answers", 0, [], step_s=None),
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(results).splitlines()]
    by_title = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    example = by_title["GRPO, LoRA (the example)"]
    assert example["success after"].startswith("70.0% (")
    assert (example["with a number"], example["correct of numbers"]) == ("50% → 100%", "0% → 70%")
    assert example["memory, GB"] == "2.0"
    assert by_title["GRPO, all weights"]["minus GRPO, points"] == "-10.0"


def test_transcripts_cannot_break_the_table():
    shown = transcripts(result("grpo", 0, answers([True, False])), 5)
    assert shown == "| What is 0? | `None` | `0\\|'x'` ✓ |\n| What is 1? | `2` | `1\\|'x'` |"
