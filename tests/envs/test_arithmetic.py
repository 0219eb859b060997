"""Arithmetic: results against Python's own evaluation, parts, and answers that are not numbers."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.error import ResetNeeded

import agentkit
from agentkit.envs.check import check


def question_of(seed: int, **kwargs: Any) -> str:
    text, _ = agentkit.make("Arithmetic-v0", **kwargs).reset(seed=seed)
    return text


def test_it_passes_the_checks_of_environments() -> None:
    failed = [result for result in check("Arithmetic-v0", operations="+-*") if not result.passed]
    assert not failed, failed


@pytest.mark.parametrize("operations", ["+", "-", "*", "+-*"])
def test_the_expert_answers_as_python_computes(operations: str) -> None:
    env = agentkit.make("Arithmetic-v0", largest=50, operations=operations)
    seen = set()
    for seed in range(200):
        text, _ = env.reset(seed=seed)
        expression = text.removeprefix("What is ").removesuffix("?")
        first, operation, second = expression.split(" ")
        assert operation in operations
        assert max(int(first), int(second)) <= 50
        seen.add(operation)
        result = eval(expression)  # the numbers and the operation were checked
        assert result >= 0
        assert list(env.expert()) == [str(result)]
        assert env.step(f" {result} ") == ("Correct.", 1.0, True, False, {"success": True, "action_valid": True})
        assert list(env.expert()) == []
    assert seen == set(operations)


@pytest.mark.parametrize(
    ("action", "valid"),
    [("999999", True), ("-1", True), ("", False), ("x", False), ("1 2", False), ("1.0", False), ("\u0661", False),
     ("1" * 5_000, False)],
)  # fmt: skip
def test_other_answers_earn_nothing(action: str, valid: bool) -> None:
    env = agentkit.make("Arithmetic-v0")
    env.reset(seed=1)
    text, reward, terminated, truncated, info = env.step(action)
    assert (text, reward) == ("Wrong." if valid else "Not a number.", 0.0)
    assert (terminated, truncated, info) == (True, False, {"success": False, "action_valid": valid})
    with pytest.raises(ResetNeeded):
        env.step("1")


def test_the_parts_share_no_question() -> None:
    train = {question_of(seed, largest=12, operations="+", split="train") for seed in range(600)}
    test = {question_of(seed, largest=12, operations="+", split="test") for seed in range(600)}
    assert not train & test
    assert len(train | test) > 150, "nearly all of 169"
    assert 0.1 < len(test) / len(train | test) < 0.3


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"largest": 8}, "largest=8 must lie between 9"),
        ({"operations": ""}, "operations='' must consist of"),
        ({"operations": "+/"}, "operations='\\+/' must consist of"),
        ({"split": "both"}, "split='both' must be"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        agentkit.make("Arithmetic-v0", **kwargs)
