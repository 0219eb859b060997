"""OpenAI's chat-completions protocol: requests are validated, answers are written. Pure functions.

Invariant: a parameter that the endpoint would not honour is refused with status 400 and its name; nothing is ignored
but labels of a request (``user``, ``metadata``, …) and the names of authors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentkit.tool_calls import Tool, ToolCall, check_tools
from agentkit.types import Message

_LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Parameters that do not change the answer."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
"""Parameters that are accepted with these values only."""
_LIMITS = ("max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "stop", "seed")
_READ = (*_LIMITS, *_SAMPLING, "model", "messages", "tools", "logprobs", "return_token_ids", "stream")
_LONGEST_STOPS, _MOST_STOPS = 1024, 16
_FinishReason = Literal["stop", "length", "tool_calls"]


class ApiError(Exception):
    """A refusal in the form of OpenAI's API.

    Args:
        status: of HTTP.
        message: the problem and the remedy.
        param: the parameter, such as ``messages[2].content``.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
        default = "invalid_request_error" if status < 500 else "server_error"
        self.body = {
            "error": {"message": message, "type": kind.get(status, default), "param": param, "code": code},
        }


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated request. None: the client left the choice to the server."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    """As in vLLM: the response has the ids of the prompt and of the answer, with the token that ends the answer."""
    stream: bool = False
    include_usage: bool = False
    """Whether the last event of a stream has the usage."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a response consists of."""

    id: str
    created: int
    model: str
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: _FinishReason
    prompt_tokens: int
    completion_tokens: int
    version: int
    """Version of the weights that sampled the last token."""
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and log-probability of each token, if they were asked for."""
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Ids of the prompt and of the answer, if they were asked for."""


# -- requests ---------------------------------------------------------------------------------------------------------


def read_request(body: Any) -> ChatRequest:
    """Return the request in a parsed body.

    Raises:
        ApiError: it is malformed, or has a parameter or a value that the endpoint does not support.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key in _NEUTRAL:
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL[key]):
                allowed = " or ".join(json.dumps(one) for one in _NEUTRAL[key])
                raise _unsupported(key, f"{key}={json.dumps(value)[:80]} is not supported: leave it out, or {allowed}")
        elif key not in (*_READ, *_LABELS, "stream_options"):
            raise _unsupported(key, f"the parameter {key[:80]!r} is not supported: leave it out")
    limits = [key for key in _LIMITS if key in given]
    if len(limits) > 1:
        raise _invalid(limits[0], f"{' and '.join(limits)} are the same limit: give one of them")
    messages, tools = _messages(given.get("messages")), _tools(given.get("tools", []))
    if not tools and any(message.calls for message in messages):
        raise _invalid("tools", "the messages have calls of tools: give the tools with every request of a conversation")
    return ChatRequest(
        model=_text(given.get("model"), "model"),
        messages=messages,
        tools=tools,
        max_tokens=_integer(given, limits[0], 1) if limits else None,
        temperature=_number(given, "temperature", 0, 2),
        top_p=_number(given, "top_p", 0, 1),
        stop=_stops(given.get("stop", [])),
        seed=_integer(given, "seed", None),
        logprobs=_flag(given, "logprobs"),
        return_token_ids=_flag(given, "return_token_ids"),
        stream=_flag(given, "stream"),
        include_usage=_include_usage(given),
    )


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise _invalid(param, f"{param} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _invalid(param, f"{param} has half of a surrogate pair") from None
    return value


def _integer(given: Mapping[str, Any], param: str, least: int | None) -> int | None:
    value = given.get(param)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise _invalid(param, f"{param} must be an integer")
    if least is not None and value < least:
        raise _invalid(param, f"{param}={value} must be at least {least}")
    return value


def _number(given: Mapping[str, Any], param: str, least: float, most: float) -> float | None:
    value = given.get(param)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _invalid(param, f"{param} must be a number")
    if not least <= value <= most or (param == "top_p" and value == 0):
        above = "above" if param == "top_p" else "at least"
        raise _invalid(param, f"{param}={value} must be {above} {least} and at most {most}")
    return float(value)


def _flag(given: Mapping[str, Any], param: str) -> bool:
    value = given.get(param, False)
    if not isinstance(value, bool):
        raise _invalid(param, f"{param} must be true or false")
    return value


def _include_usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or (options and given.get("stream") is not True):
        raise _invalid("stream_options", "stream_options must be an object, and needs stream=true")
    for key, value in options.items():
        if key not in ("include_usage", "include_obfuscation") or (key == "include_obfuscation" and value):
            raise _unsupported(f"stream_options.{key}", f"stream_options.{key[:80]} is not supported: leave it out")
    return _flag(options, "include_usage")


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise _invalid("stop", f"stop must be a string or a list of at most {_MOST_STOPS} strings")
    for place, one in enumerate(stops):
        if not 0 < len(_text(one, f"stop[{place}]")) <= _LONGEST_STOPS:
            raise _invalid("stop", f"stop[{place}] must have 1 to {_LONGEST_STOPS} characters")
    return tuple(stops)


def _tools(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        raise _invalid("tools", "tools must be a list")
    tools = []
    for place, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise _invalid(f"tools[{place}]", f"tools[{place}] must be a function: {{type, function}}")
        if function.get("strict"):
            raise _unsupported(
                f"tools[{place}].function.strict", "strict functions are not supported: leave `strict` out"
            )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        known = {
            "description": "",
            **{key: one for key, one in function.items() if key != "strict" and one is not None},
        }
        tools.append({**tool, "function": {**known, "parameters": parameters}})
    try:
        checked = check_tools(tools)
    except ValueError as error:
        raise _invalid("tools", str(error)) from None
    _text(json.dumps(checked, ensure_ascii=False), "tools")
    return checked


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", "messages must be a list of at least one message")
    messages: list[Message] = []
    ids: list[str] = []
    """Calls that have no result yet, in order."""
    results: dict[str, Message] = {}
    for place, one in enumerate(value):
        where = f"messages[{place}]"
        role = one.get("role") if isinstance(one, dict) else None
        if role == "tool":
            call = one.get("tool_call_id")
            if call not in ids or call in results:
                raise _invalid(
                    f"{where}.tool_call_id", f"{where}.tool_call_id must be the id of a preceding call without a result"
                )
            _check_keys(one, where, {"role", "content", "tool_call_id", "name"})
            results[call] = Message("tool", _content(one.get("content"), f"{where}.content"))
            if len(results) == len(ids):  # results are in the order of the calls
                messages += [results[id_] for id_ in ids]
                ids, results = [], {}
            continue
        if ids:
            raise _invalid(
                where, f"{where} must be the result of the call {next(i for i in ids if i not in results)!r}"
            )
        if role in ("system", "developer", "user"):
            _check_keys(one, where, {"role", "content", "name"})
            author: Literal["system", "user"] = "user" if role == "user" else "system"
            messages.append(Message(author, _content(one.get("content"), f"{where}.content")))
        elif role == "assistant":
            _check_keys(one, where, {"role", "content", "name", "tool_calls"})
            calls, ids = _calls(one.get("tool_calls") or [], where)
            content = one.get("content")
            if content is None and not calls:
                raise _invalid(f"{where}.content", f"{where} needs content or tool_calls")
            text = "" if content is None else _content(content, f"{where}.content")
            messages.append(Message("assistant", text, calls))
        else:
            raise _invalid(f"{where}.role", f"{where}.role must be system, developer, user, assistant or tool")
    if ids:
        missing = next(id_ for id_ in ids if id_ not in results)
        raise _invalid("messages", f"the messages must end with the result of the call {missing!r}")
    if messages[-1].role == "assistant":
        raise _invalid("messages", "the last message is the assistant's: end with another one, which it answers")
    return tuple(messages)


def _check_keys(message: Mapping[str, Any], where: str, known: set[str]) -> None:
    for key, value in message.items():
        if key not in known and not _says_nothing(value):
            raise _unsupported(f"{where}.{key}", f"{where}.{str(key)[:80]} is not supported: leave it out")


def _says_nothing(value: Any) -> bool:
    """Return whether a field is empty, or an object of empty fields: clients send those of other providers."""
    inside = value.values() if isinstance(value, dict) else [value]
    return all(one in (None, "", [], {}) for one in inside)


def _content(value: Any, param: str) -> str:
    if not isinstance(value, list):
        return _text(value, param)
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _unsupported(f"{param}[{place}]", f"{param}[{place}] is {kind!r:.80}: only text is supported")
        texts.append(_text(part.get("text"), f"{param}[{place}].text"))
    return "".join(texts)


def _calls(value: Any, where: str) -> tuple[tuple[ToolCall, ...], list[str]]:
    """Return the calls of a message, and their ids."""
    if not isinstance(value, list):
        raise _invalid(f"{where}.tool_calls", f"{where}.tool_calls must be a list")
    calls, ids = [], []
    for place, call in enumerate(value):
        param = f"{where}.tool_calls[{place}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(call.get("id"), str) or call["id"] in ids:
            raise _invalid(param, f"{param} must be a function call with an id of its own: {{id, type, function}}")
        name = _text(function.get("name"), f"{param}.function.name")
        try:
            arguments = json.loads(_text(function.get("arguments"), f"{param}.function.arguments") or "{}")
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _invalid(f"{param}.function.arguments", f"{param}.function.arguments must be a JSON object, as text")
        calls.append(ToolCall(name, arguments))
        ids.append(call["id"])
    return tuple(calls), ids


# -- responses --------------------------------------------------------------------------------------------------------


def response(reply: Reply) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.calls:
        message |= {"content": reply.content or None, "tool_calls": _written_calls(reply)}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reply.finish_reason,
        "logprobs": _logprobs(reply),
    }
    body = {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
    if reply.ids is not None:
        body["prompt_token_ids"], choice["token_ids"] = map(list, reply.ids)
    return body


def chunks(reply: Reply, *, usage: bool) -> list[dict[str, Any]]:
    """Return the events of a streamed response.

    Args:
        reply: the whole answer.
        usage: whether an event with the usage ends the stream.
    """
    head = _head(reply, "chat.completion.chunk") | ({"usage": None} if usage else {})

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return {**head, "choices": [choice]}

    events = [chunk({"role": "assistant", "content": ""})]
    if reply.content or reply.tokens or reply.ids:
        events.append(chunk({"content": reply.content}, logprobs=_logprobs(reply)))
    if reply.ids is not None:
        events[0]["prompt_token_ids"], events[1]["choices"][0]["token_ids"] = map(list, reply.ids)
    for index, call in enumerate(_written_calls(reply)):
        events.append(chunk({"tool_calls": [{"index": index, **call}]}))
    events.append(chunk({}, reply.finish_reason))
    if usage:
        events.append({**head, "choices": [], "usage": _usage(reply)})
    return events


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    fingerprint = f"weights-{reply.version}"
    return {
        "id": reply.id,
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "system_fingerprint": fingerprint,
    }


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _written_calls(reply: Reply) -> list[dict[str, Any]]:
    """Return the calls; their ids are unique among all answers."""
    written = []
    for index, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        written.append({"id": f"call_{reply.id.rpartition('-')[2]}_{index}", "type": "function", "function": function})
    return written


def _logprobs(reply: Reply) -> dict[str, Any] | None:
    if not reply.tokens:
        return None
    content = [
        {
            "token": token,
            "logprob": logprob,
            "bytes": None if "\ufffd" in token else list(token.encode()),
            "top_logprobs": [],
        }
        for token, logprob in reply.tokens
    ]
    return {"content": content, "refusal": None}
