"""Answers are parsed as they were formatted, and other text is invalid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.trainers.rollout.parser import ActionParser, NumberParser, ParsedAnswer

INVALID = ParsedAnswer((), valid=False)


@pytest.mark.parametrize(
    ("text", "actions"),
    [
        ("<answer>Right</answer>", ("Right",)),
        ("<answer> Right || Down </answer>", ("Right", "Down")),
        ("I see a hole.\n<answer>Left</answer> as I said", ("Left",)),
        ("<answer>Left</answer> no: <answer>Up</answer>", ("Up",)),
        ("<think><answer>Left</think><answer>Up</answer>", ("Up",)),
        ("<answer>search[red || shoes]</answer>", ("search[red", "shoes]")),
        ("<answer>a\nb</answer>", ("a\nb",)),
    ],
)
def test_tagged(text: str, actions: tuple[str, ...]) -> None:
    assert ActionParser("tagged", 2).parse(text) == ParsedAnswer(actions, valid=True)


def test_a_single_action_may_hold_the_separator() -> None:
    parser = ActionParser("tagged", 1)
    assert parser.parse("<answer>bash true || false</answer>") == ParsedAnswer(("bash true || false",), valid=True)
    assert parser.format(["bash true || false"]) == "<answer>bash true || false</answer>"
    with pytest.raises(ValueError, match="reads back"):
        parser.format(["bash true", "submit"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Right",
        "<answer></answer>",
        "<answer> </answer>",
        "<answer>Right",
        "Right</answer>",
        "</answer>Right<answer>",
        "<answer>Up</answer><answer>Right",
        "<answer>Right ||</answer>",
        "<answer>|| Right</answer>",
        "<answer>a || b || c</answer>",
        "<ANSWER>Right</ANSWER>",
    ],
)
def test_invalid_format(text: str) -> None:
    assert ActionParser("tagged", 2).parse(text) == INVALID


def test_plain_takes_the_whole_text_as_one_action() -> None:
    parser = ActionParser("plain", 5)
    assert parser.actions_per_turn == 1
    assert parser.parse(" go || north \n") == ParsedAnswer(("go || north",), valid=True)
    assert parser.parse("  ") == INVALID
    assert parser.format(["look at <answer>"]) == "look at <answer>"


@given(st.lists(st.text(), max_size=5), st.sampled_from(["tagged", "plain"]), st.integers(1, 4))
def test_parse_reverses_format(actions: list[str], kind, most: int) -> None:
    parser = ActionParser(kind, most)
    try:
        text = parser.format(actions)
    except ValueError:
        return
    assert parser.parse("reasoning " * (kind == "tagged") + text) == ParsedAnswer(tuple(actions), valid=True)


@given(st.lists(st.text("abc xyz", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=4))
def test_ordinary_actions_always_have_a_form(actions: list[str]) -> None:
    parser = ActionParser("tagged", 4)
    assert parser.parse(parser.format(actions)).actions == tuple(actions)


@pytest.mark.parametrize("actions", [[], ["a", "b", "c"], [""], [" a"], ["a || b"], ["</answer>"], ["<answer>"]])
def test_actions_without_a_form_are_refused(actions: list[str]) -> None:
    with pytest.raises(ValueError, match="reads back"):
        ActionParser("tagged", 2).format(actions)


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    for parser in (ActionParser("tagged", 3), ActionParser("plain")):
        answer = parser.parse(text)
        assert answer.valid == bool(answer.actions)
        assert len(answer.actions) <= parser.actions_per_turn


def test_instructions_show_the_form_that_it_reads() -> None:
    for parser in (ActionParser("tagged"), ActionParser("tagged", 3)):
        assert parser.parse(parser.instructions).valid


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("7 + 5 = 12.", "12"),
        ("The answer is 1,234.", "1234"),
        ("17-5", "5"),
        ("17 - 20 = -3", "-3"),
        ("it is −3", "-3"),
        ("about 3.14", "3.14"),
        ("between 1,2 and 3,45", "45"),
        ("$12", "12"),
        ("**12**\n", "12"),
        ("at least 3, at most 4, in group A7", "4"),
    ],
)
def test_the_last_number_is_the_action(text: str, number: str) -> None:
    assert NumberParser().parse(text) == ParsedAnswer((number,), valid=True)


@pytest.mark.parametrize("text", ["", "twelve", "A7", "…", "١٢"])
def test_a_text_without_a_number_is_invalid(text: str) -> None:
    assert NumberParser().parse(text) == INVALID


@given(st.text(), st.integers() | st.decimals(-10, 10, allow_nan=False, places=3))
def test_numbers_are_read_after_any_text(text: str, number: object) -> None:
    parser = NumberParser()
    assert parser.parse(parser.format([str(number)])) == ParsedAnswer((str(number),), valid=True)
    assert parser.parse(f"{text} {number}") == ParsedAnswer((str(number),), valid=True)


@pytest.mark.parametrize("actions", [[], ["1", "2"], ["x"], ["1,234"], ["1 2"], [""]])
def test_only_one_number_has_an_answer(actions: list[str]) -> None:
    with pytest.raises(ValueError, match="reads back"):
        NumberParser().format(actions)
