"""Requests of OpenAI's protocol: what is read, and what is refused with the name of the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from agentkit.tool_calls import ToolCall
from agentkit.trainers.endpoint.protocol import ApiError, ChatRequest, Reply, chunks, read_request, response
from agentkit.types import Message

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}


def call(id: str, arguments: str = "{}", name: str = "price") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, content: Any = "12") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def calls(*given: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(given)}


def request(**fields: Any) -> ChatRequest:
    return read_request({"model": "m", "messages": [HELLO], **fields})


def test_everything_is_read() -> None:
    read = request(
        messages=[
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {**calls(call("x", '{"item": "lamp"}'), call("y")), "refusal": None, "annotations": [], "audio": None},
            result("y", [{"type": "text", "text": "80"}]),
            result("x"),
        ],
        tools=[TOOL],
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop="END",
        seed=-3,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        presence_penalty=0.0,
        tool_choice="auto",
        user="me",
        response_format=None,
    )
    assert read.messages == (
        Message("system", "Rules."),
        Message("user", "ab"),
        Message("assistant", "", (ToolCall("price", {"item": "lamp"}), ToolCall("price", {}))),
        Message("tool", "12"),
        Message("tool", "80"),
    )
    assert (read.max_tokens, read.temperature, read.top_p, read.stop, read.seed) == (7, 0.5, 0.9, ("END",), -3)
    assert (read.logprobs, read.stream, read.include_usage) == (True, True, True)
    assert read.tools[0]["function"]["description"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"functions": []}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": "1"}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"pace": 1}}, "stream_options.pace"),
        ({"model": 3}, "model"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [HELLO, {"role": "assistant", "content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "bot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": ["Hi"]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{**HELLO, "cache_control": {"type": "x"}}]}, "messages[0].cache_control"),
        ({"messages": [HELLO, {"role": "assistant"}, HELLO]}, "messages[1].content"),
        ({"messages": [HELLO, result("x")]}, "messages[1].tool_call_id"),
        ({"messages": [HELLO, calls(call("x")), HELLO]}, "messages[2]"),
        ({"messages": [HELLO, calls(call("x"), call("y")), result("x")]}, "messages"),
        ({"messages": [HELLO, calls(call("x"), call("x"))]}, "messages[1].tool_calls[0]"),
        ({"messages": [HELLO, calls(call("x", "[1]")), result("x")]}, "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [HELLO, calls(call("x")), result("x")]}, "tools"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        request(**fields)
    error = caught.value.body["error"]
    assert (caught.value.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param if param != "messages[1].tool_calls[0]" else error["param"].startswith(param[:-2])
    assert error["message"]
    assert error["code"] in ("invalid_value", "unsupported_parameter")


def test_an_answer_with_calls() -> None:
    reply = Reply("chatcmpl-7", 1, "m", "", (ToolCall("price", {"item": "ä"}),), "tool_calls", 5, 2, 3)
    (choice,) = response(reply)["choices"]
    written = choice["message"]
    assert written["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    streamed = chunks(reply, usage=True)
    deltas = [event["choices"][0]["delta"] for event in streamed[:-1]]
    assert deltas[1]["tool_calls"] == [{"index": 0, **written["tool_calls"][0]}]
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    again = request(messages=[HELLO, written, result(written["tool_calls"][0]["id"])], tools=[TOOL])
    assert again.messages[1] == Message("assistant", "", reply.calls)
