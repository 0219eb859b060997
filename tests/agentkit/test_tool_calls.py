"""Tool calls are read as they were meant, or refused with a reason; nothing else happens for any text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.tool_calls import (
    FORMATS,
    ToolCall,
    ToolCallError,
    action_of,
    call_of,
    check_call,
    check_tools,
    read_calls,
    write_hermes,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find a word.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "count": {"type": "integer"},
                    "mode": {"enum": ["all", "one"]},
                    "exact": {"type": "boolean"},
                    "places": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "End.", "parameters": {"type": "object"}}},
]
CALL = ToolCall("find", {"word": "sun", "count": 3})
JSON = '{"word": "sun", "count": 3}'
DEEP = '{"a": ' * 200 + "1" + "}" * 200
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
WRITTEN = [  # as in the documentation of the models
    ("hermes", f'<tool_call>\n{{"name": "find", "arguments": {JSON}}}\n</tool_call>'),
    ("hermes", f'<tool_call>{{"arguments": {json.dumps(JSON)}, "name": "find"}}</tool_call>\n'),
    ("qwen_xml", "<tool_call>\n<function=find>\n<parameter=word>\nsun\n</parameter>\n"
     "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>"),
    ("glm", "<tool_call>find\n<arg_key>word</arg_key>\n<arg_value>sun</arg_value>\n<arg_key>count</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>"),
    ("glm", "<tool_call>find<arg_key>word</arg_key><arg_value>sun</arg_value><arg_key>count</arg_key>"
     "<arg_value>3</arg_value></tool_call>"),
    ("deepseek", DEEPSEEK.format(f"function<｜tool▁sep｜>find\n```json\n{JSON}\n```")),
    ("deepseek", DEEPSEEK.format(f"find<｜tool▁sep｜>{JSON}")),
    ("gpt_oss", f" to=functions.find<|channel|>commentary json<|message|>{JSON}"),
    ("gpt_oss", f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{JSON}<|call|>"),
    ("mistral", f'[TOOL_CALLS] [{{"name": "find", "arguments": {JSON}, "id": "abcdefghi"}}]'),
    ("mistral", f"[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{JSON}"),
    ("llama", f'{{"name": "find", "parameters": {JSON}}}'),
    ("llama", f'<|python_tag|>{{"type": "function", "name": "find", "parameters": {JSON}}}'),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text"), WRITTEN)
def test_a_call_is_read(format: Any, text: str) -> None:
    assert read_calls(text, format, TOOLS).calls == (CALL,)


@pytest.mark.parametrize(("format", "text"), [one for one in WRITTEN if one[0] not in ("llama", "gpt_oss")])
def test_the_content_comes_before_the_call(format: Any, text: str) -> None:
    answer = read_calls(f"<think>\nWhy <tool_call>?\n</think>\n\nI look. {text}", format, TOOLS)
    assert answer.calls == (CALL,)
    assert answer.content == "<think>\nWhy <tool_call>?\n</think>\n\nI look."
    with pytest.raises(ToolCallError, match="text follows the call"):
        read_calls(f"{text} and on", format, TOOLS)


def test_what_a_model_thinks_aloud_is_the_content_of_a_harmony_answer() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{WRITTEN[7][1]}"
    answer = read_calls(text, "gpt_oss")
    assert (answer.content, answer.calls) == ("Hm.", (CALL,))


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_without_a_call_is_content(format: Any) -> None:
    text = "<think>\nThe <tool_call> would help.\n</think>\n\nThe sun."
    assert read_calls("The sun.", format).calls == ()
    if format not in ("hermes", "qwen_xml", "glm"):
        assert read_calls(text, format) == read_calls(text, "mistral")
    assert read_calls("<think> <tool_call>{}</tool_call>", format).calls == ()


@pytest.mark.parametrize(
    ("format", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "find", "arguments": {"word": "sun}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"word": NaN}}</tool_call>', "not valid JSON"),
        ("hermes", '<tool_call>{"name": "find", "arguments": []}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": ["find"]}</tool_call>', "must be of the form"),
        ("hermes", '<tool_call>{"name": "find"}', "</tool_call> is missing"),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"word": "\\ud800"}}</tool_call>', "surrogate"),
        ("hermes", f"<tool_call>{'[' * 100_000}", "nested too deeply"),
        ("hermes", f'<tool_call>{{"name": "a", "arguments": {DEEP}}}</tool_call>', "32 levels are allowed"),
        ("qwen_xml", f"<tool_call><function=a><parameter=b>{DEEP}</parameter></function></tool_call>", "32 levels"),
        ("glm", f"<tool_call>a<arg_key>b</arg_key><arg_value>{DEEP}</arg_value></tool_call>", "32 levels"),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"word": 1e999}}</tool_call>', "too large"),
        ("glm", '<tool_call>a<arg_key>b</arg_key><arg_value>"\\ud800"</arg_value></tool_call>', "surrogate"),
        ("hermes", f'<tool_call>{{"name": "find", "arguments": {{"count": {"9" * 5000}}}}}</tool_call>', "not valid"),
        ("qwen_xml", "<tool_call>find</tool_call>", "<function=NAME>"),
        ("qwen_xml", "<tool_call><function=find><parameter=word>\nsun</function></tool_call>", "is missing"),
        ("glm", "<tool_call></tool_call>", "name of a tool"),
        ("glm", "<tool_call>find<arg_key>word</arg_key></tool_call>", "is missing"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "must follow"),
        ("gpt_oss", "<|channel|>commentary to=browser.open<|message|>{}", "no recipient 'browser.open'"),
        ("llama", '{"name": "find", "parameters": {}}; {"name": "stop"}', "text follows the call"),
        ("mistral", "[TOOL_CALLS][]", "must be of the form"),
    ],
)
def test_a_malformed_call_is_refused_with_a_reason(format: Any, text: str, problem: str) -> None:
    with pytest.raises(ToolCallError, match=problem):
        read_calls(text, format, TOOLS)


PIECES = [
    *("<tool_call>", "</tool_call>", "<function=find>", "</function>", "<parameter=word>", "</parameter>", "find"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json\n", "```"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", " to=functions.find", "<|channel|>commentary", "<|message|>"),
    *("<|call|>", "<|end|>", "{", "}", "[", ":", '"', '"name"', "\n", "\\", "</think>", "<think>", "x", "\ud800"),
    '{"name": "find", "arguments": {"word": "x"}}',
]


@settings(max_examples=300, deadline=None)
@given(format=st.sampled_from(list(FORMATS)), pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_any_text_is_read_or_refused(format: Any, pieces: list[str]) -> None:
    try:
        answer = read_calls("".join(pieces), format, TOOLS)
    except ToolCallError:
        return
    for call in answer.calls:
        assert json.loads(action_of(call)) == {"name": call.name, "arguments": call.arguments}


plain_texts = st.text(st.characters(codec="utf-8"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_texts, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(arguments=st.dictionaries(plain_texts, json_values | st.just("</tool_call></think>")))
def test_a_written_call_is_read_as_it_was(arguments: dict[str, Any]) -> None:
    call = ToolCall("find", arguments)
    assert read_calls(write_hermes(call), "hermes").calls == (call,)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "find: the argument 'word' is missing"),
        ({"word": 3}, "find: word: 3 must be of type string"),
        ({"word": "a", "count": True}, "count: true must be of type integer"),
        ({"word": "a", "mode": "none"}, 'mode: "none" must be one of "all", "one"'),
        ({"word": "a", "places": [1, "b"]}, 'places: "b" must be of type number'),
        ({"word": "a", "colour": 1}, "there is no argument 'colour'; the arguments are word, count"),
    ],
)
def test_arguments_are_compared_with_the_tool(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolCallError) as caught:
        check_call(ToolCall("find", arguments), TOOLS)
    assert problem in str(caught.value)


def test_an_action_is_a_call_of_a_known_tool() -> None:
    whole = ToolCall("find", {"word": "é\n", "count": 1, "mode": "one", "exact": True, "places": [1, 2.5]})
    assert call_of(action_of(whole), TOOLS) == whole
    assert call_of('{"name": "stop"}', TOOLS) == ToolCall("stop", {})
    for action, problem in (
        ('{"name": "fly"}', "there is no tool 'fly'; the tools are find, stop"),
        ("sun", "not valid JSON"),
        ('{"name": "stop"} now', "text follows"),
    ):
        with pytest.raises(ToolCallError, match=problem):
            call_of(action, TOOLS)


def test_types_decide_about_values_without_quotation_marks() -> None:
    text = "<tool_call>\n<function=find>\n<parameter=word>\n12\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n" \
        "</function>\n</tool_call>"  # fmt: skip
    assert read_calls(text, "qwen_xml", TOOLS).calls[0].arguments == {"word": "12", "exact": True}
    assert read_calls(text, "qwen_xml").calls[0].arguments == {"word": 12, "exact": True}


def test_a_value_may_contain_its_own_closing_tag() -> None:
    text = "<tool_call>\n<function=find>\n<parameter=word>\na</parameter>b\n</parameter>\n</function>\n</tool_call>"
    assert read_calls(text, "qwen_xml", TOOLS).calls[0].arguments == {"word": "a</parameter>b"}


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("find", "not a list"),
        ([{"name": "find"}], "not of the form"),
        ([TOOLS[0], TOOLS[0]], "must be unique"),
        ([{"type": "function", "function": {"name": "a b", "description": ""}}], "letters, digits"),
        ([{"type": "function", "function": {"name": "a"}}], "needs a text `description`"),
        ([{"type": "function", "function": {"name": "a", "description": "", "parameters": {}}}], '"type": "object"'),
        ([{"type": "function", "function": {"name": "a", "description": "", "x": {1}}}], "plain JSON"),
    ],
)
def test_wrong_declarations_are_named(tools: Any, problem: str) -> None:
    assert check_tools(TOOLS) == tuple(TOOLS)
    with pytest.raises(ValueError, match=problem):
        check_tools(tools)
