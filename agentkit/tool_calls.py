"""Tool calls: how models write them, and what environments get of them.

Invariant: an answer of a model is read as calls with JSON arguments, or refused with a ``ToolCallError`` whose message
can be shown to the model; no other exception. Nothing in an answer is executed. Calls end an answer, so that the answer
is known from its content and its calls.

This module needs no tokenizer and no other package: it reads texts in which special tokens are spelled out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

ToolFormatName = Literal["hermes", "qwen_xml", "glm", "deepseek", "gpt_oss", "mistral", "llama"]

_MAX_DEPTH = 32
"""Levels of lists and objects in the arguments of a call."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SPACE = re.compile(r"\s*")
_END_OF_REASONING = "</think>"


Tool = dict[str, Any]
"""A tool as chat APIs describe it: ``{"type": "function", "function": {"name": …, "description": …, "parameters": JSON
schema}}``."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    """JSON values."""


class ToolCallError(ValueError):
    """A call that cannot be carried out. The message says why, for the model."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """An answer: the text before its calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write calls."""

    name: ToolFormatName
    close: str
    """The end of the last call, a regular expression."""
    read: Callable[[str, Sequence[Tool]], ToolAnswer]
    """Reads an answer, for these tools. Raises ``ToolCallError``."""


def read_calls(text: str, format: ToolFormatName, tools: Sequence[Tool] = ()) -> ToolAnswer:
    """Read an answer of a model.

    Args:
        text: the answer without the token that ended it; special tokens are spelled out.
        format: how the model writes calls.
        tools: the tools; formats that write arguments without quotation marks need their types.

    Returns:
        The content and the calls, which are not compared with ``tools``. There may be none.

    Raises:
        ToolCallError: there is an incomplete or malformed call, or text after the calls.
    """
    answer = _read(text, FORMATS[format].read, tools)
    for call in answer.calls:
        _check_json(call)
    return answer


def _read(text: str, read: Callable[[str, Sequence[Tool]], ToolAnswer], tools: Sequence[Tool]) -> ToolAnswer:
    """Read an answer, of which what the model thinks comes first."""
    reasoning, end, rest = text.partition(_END_OF_REASONING)
    if end:
        # A call that the model only thinks about is none.
        answer = read(rest, tools)
        if answer.calls:
            return ToolAnswer(reasoning + end + answer.content, answer.calls)
    elif reasoning.lstrip().startswith("<think>"):
        return ToolAnswer(text, ())
    return read(text, tools)


def action_of(call: ToolCall) -> str:
    """Return a call as an action of an environment: ``{"name": …, "arguments": {…}}``."""
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)


def call_of(action: str, tools: Sequence[Tool]) -> ToolCall:
    """Return the call in an action.

    Args:
        action: ``{"name": …, "arguments": {…}}``.
        tools: the tools of the environment.

    Raises:
        ToolCallError: the text is not a call, or does not fit the tools.
    """
    value, end = _json(action, 0)
    if action[end:].strip():
        raise ToolCallError("text follows the call")
    call = _call(value)
    _check_json(call)
    check_call(call, tools)
    return call


def check_call(call: ToolCall, tools: Sequence[Tool]) -> None:
    """Raise ``ToolCallError`` unless ``call`` names one of ``tools`` and its arguments fit."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        raise ToolCallError(f"there is no tool {call.name!r:.80}; the tools are {', '.join(functions)}")
    parameters = functions[call.name].get("parameters") or {}
    _check_value(call.arguments, {"type": "object", "properties": {}, **parameters}, f"{call.name}: ")


def check_tools(tools: Any) -> tuple[Tool, ...]:
    """Return the tools that an environment declares.

    Args:
        tools: descriptions of functions, as chat APIs have them: ``{"type": "function", "function": {"name": …,
            "description": …, "parameters": JSON schema of an object}}``.

    Raises:
        ValueError: the descriptions are malformed; the message names the place.
    """
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools is {tools!r:.80}, not a list")
    names: list[str] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise ValueError(f'tools[{place}] is not of the form {{"type": "function", "function": {{…}}}}')
        name, parameters = function.get("name"), function.get("parameters", {"type": "object"})
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in names:
            raise ValueError(
                f"tools[{place}]: the name {name!r:.80} must be unique and consist of letters, digits, _ and -"
            )
        if not isinstance(function.get("description"), str):
            raise ValueError(f"tools[{place}]: {name} needs a text `description`")
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
            raise ValueError(f"tools[{place}]: the parameters of {name} are not a JSON schema of an object")
        if parameters.get("type") != "object":
            raise ValueError(f'tools[{place}]: the parameters of {name} need "type": "object"')
        names.append(name)
    try:
        json.dumps(tools, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"tools: they are not plain JSON data ({error})") from None
    return tuple(tools)


def wrap_hermes(name: str, arguments: str) -> str:
    """Return a call in the format ``hermes``; ``arguments`` is a JSON text."""
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


def write_hermes(call: ToolCall) -> str:
    """Return a call in the format ``hermes``."""
    return wrap_hermes(call.name, json.dumps(call.arguments, ensure_ascii=False))


# -- formats ----------------------------------------------------------------------------------------------------------


def _marked(text: str, opening: str, read: Callable[[int], tuple[ToolCall, int]]) -> ToolAnswer:
    """Read calls that ``opening`` begins; ``read`` gets the place after it, and returns a call and the place after
    it."""
    calls = []
    start = text.find(opening)
    if start < 0:
        return ToolAnswer(text, ())
    at = start
    while text.startswith(opening, at):
        call, end = read(at + len(opening))
        calls.append(call)
        at = _skip(text, end)
    if at < len(text):
        _fail(f"text follows the call ({text[at : at + 20]!r}): end your answer with the call")
    return ToolAnswer(text[:start].rstrip(), tuple(calls))


def _hermes(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    def read(at: int) -> tuple[ToolCall, int]:
        value, end = _json(text, at)
        return _call(value), _expect(text, end, "</tool_call>")

    return _marked(text, "<tool_call>", read)


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)  # a value may contain its own closing tag


def _qwen_xml(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``<tool_call><function=…><parameter=…>…</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5, Nemotron."""

    def read(at: int) -> tuple[ToolCall, int]:
        head = _FUNCTION.match(text, at) or _fail("<function=NAME> must follow <tool_call>")
        name, arguments, at = head[1].strip(), {}, head.end()
        while found := _PARAMETER.match(text, at):
            _add(arguments, found[1], found[2], name, tools)
            at = found.end()
        return ToolCall(name, arguments), _expect(text, _expect(text, at, "</function>"), "</tool_call>")

    return _marked(text, "<tool_call>", read)


_GLM_NAME = re.compile(r"\s*([^\s<]*)\s*")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)


def _glm(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>``: GLM-4.5 and later."""

    def read(at: int) -> tuple[ToolCall, int]:
        head = _GLM_NAME.match(text, at)
        assert head is not None
        name, arguments, at = head[1], {}, head.end()
        while found := _GLM_ARGUMENT.match(text, at):
            _add(arguments, found[1].strip(), found[2], name, tools)
            at = found.end()
        return ToolCall(name or _fail("the name of a tool must follow <tool_call>"), arguments), _expect(
            text, at, "</tool_call>"
        )

    return _marked(text, "<tool_call>", read)


def _deepseek(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` and a block of JSON (V3, R1), or
    ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}`` (V3.1), each up to ``<｜tool▁call▁end｜>``."""
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

    def read(at: int) -> tuple[ToolCall, int]:
        calls = []
        while text.startswith(begin, at := _skip(text, at)):
            at += len(begin)
            cut = text.find(separator, at)
            if cut < 0:
                _fail(f"{separator} is missing in a call")
            name, at = text[at:cut].strip(), cut + len(separator)
            if fenced := name == "function":
                cut = text.find("\n", at)
                if cut < 0:
                    _fail("the name of a tool and a block of JSON must follow 'function'")
                name, at = text[at:cut].strip(), _expect(text, cut, "```json")
            arguments, at = _json(text, at)
            calls.append(_call({"name": name, "arguments": arguments}))
            at = _expect(text, _expect(text, at, "```") if fenced else at, end)
        if not calls:
            _fail(f"{begin} must follow <｜tool▁calls▁begin｜>")
        several.extend(calls)
        return calls[-1], _expect(text, at, "<｜tool▁calls▁end｜>")

    several: list[ToolCall] = []
    answer = _marked(text, "<｜tool▁calls▁begin｜>", read)
    return ToolAnswer(answer.content, tuple(several))


_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")


def _gpt_oss(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """Messages of OpenAI's harmony format: a header up to ``<|message|>``, then the content. Calls go to a recipient
    ``functions.NAME`` in the channel ``commentary``; what the model thinks is in the channel ``analysis``."""
    contents, calls, at = [], [], 0
    while at < len(text):
        header, found, _ = text[at:].partition("<|message|>")
        if not found:
            contents.append(text[at:])
            break
        at += len(header) + len(found)
        recipient = _RECIPIENT.search(header)
        if recipient is None:
            if calls:
                _fail("a message follows the call: end your answer with the call")
            body, ended, _ = text[at:].partition("<|end|>")
            contents.append(body)
            at += len(body) + len(ended)
            continue
        prefix, _, name = recipient[1].partition(".")
        if prefix != "functions":
            _fail(f"there is no recipient {recipient[1]!r:.80}; tools are in functions, such as to=functions.NAME")
        arguments, at = _json(text, at)
        calls.append(_call({"name": name, "arguments": arguments}))
        at = _skip(text, at)
        at = _expect(text, at, "<|call|>") if at < len(text) else at
    return ToolAnswer("\n".join(contents) if calls else text, tuple(calls))


def _llama(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``{"name": …, "parameters": {…}}`` alone: Llama 3.1 and later."""
    at = _expect(text, 0, _PYTHON_TAG) if text.lstrip().startswith(_PYTHON_TAG) else 0
    if not at and not text.lstrip().startswith("{"):
        return ToolAnswer(text, ())
    value, end = _json(text, at)
    if text[end:].strip():
        _fail("text follows the call: end your answer with the call")
    if isinstance(value, dict) and "parameters" in value:
        value = {"name": value.get("name"), "arguments": value["parameters"]}
    return ToolAnswer("", (_call(value),))


_PYTHON_TAG = "<|python_tag|>"
_MISTRAL_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]")


def _mistral(text: str, tools: Sequence[Tool]) -> ToolAnswer:
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, or ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    several: list[ToolCall] = []

    def read(at: int) -> tuple[ToolCall, int]:
        if head := _MISTRAL_HEAD.match(text, at):
            arguments, end = _json(text, head.end())
            calls = [_call({"name": head[1], "arguments": arguments})]
        else:
            value, end = _json(text, at)
            calls = [_call(one) for one in value] if isinstance(value, list) and value else [_call(value)]
        several.extend(calls)
        return calls[-1], end

    answer = _marked(text, "[TOOL_CALLS]", read)
    return ToolAnswer(answer.content, tuple(several))


FORMATS: Mapping[ToolFormatName, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat("hermes", "</tool_call>", _hermes),
        ToolFormat("qwen_xml", "</tool_call>", _qwen_xml),
        ToolFormat("glm", "</tool_call>", _glm),
        ToolFormat("deepseek", "<｜tool▁calls▁end｜>", _deepseek),
        ToolFormat("gpt_oss", r"\}", _gpt_oss),
        ToolFormat("mistral", r"\}\]?", _mistral),
        ToolFormat("llama", r"\}", _llama),
    )
}
"""All formats. The one of a chat template is the first that reads what the template writes."""
assert set(FORMATS) == set(get_args(ToolFormatName))


# -- parts of a call --------------------------------------------------------------------------------------------------


def _fail(problem: str) -> NoReturn:
    raise ToolCallError(problem)


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _expect(text: str, at: int, token: str) -> int:
    """Return the place after ``token``, which white space may precede."""
    at = _skip(text, at)
    if not text.startswith(token, at):
        found = repr(text[at : at + 20]) if at < len(text) else "the end of the answer"
        _fail(f"{token} is missing in a call, before {found}")
    return at + len(token)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a place, and the place after it."""
    try:
        return _DECODER.raw_decode(text, _skip(text, at))
    except json.JSONDecodeError as error:
        near = text[max(at, error.pos - 20) : error.pos + 20]
        _fail(f"the call is not valid JSON: {error.msg}, near {near!r}")
    except RecursionError:
        _fail("the call is not valid JSON: it is nested too deeply")
    except ValueError as error:
        _fail(f"the call is not valid JSON: {error}")


def _call(value: Any) -> ToolCall:
    """Return the call ``{"name": …, "arguments": {…}}``; the arguments may be a text of JSON, or missing."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        _fail('a call must be of the form {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments, _ = _json(arguments, 0)
    if not isinstance(arguments, dict):
        _fail(f"the arguments of {value['name']!r:.80} must be a JSON object")
    return ToolCall(value["name"], arguments)


def _check_json(call: ToolCall) -> None:
    """Raise ``ToolCallError`` unless a call can be written as JSON and is nested in bounded depth."""
    layer: list[Any] = [call.arguments]
    for _ in range(_MAX_DEPTH):
        layer = [part for value in layer for part in (value.values() if isinstance(value, dict) else value)]
        layer = [part for part in layer if isinstance(part, (dict, list))]
    if layer:
        _fail(f"the call is nested too deeply: {_MAX_DEPTH} levels are allowed")
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        _fail("a text in the call has half of a surrogate pair")
    except ValueError as error:
        _fail(f"a number in the call is too large ({error})")


def _add(arguments: dict[str, Any], key: str, text: str, name: str, tools: Sequence[Tool]) -> None:
    """Add an argument that was written without quotation marks; its type follows from the tool."""
    schema = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    wanted = _types((schema.get("parameters") or {}).get("properties", {}).get(key, {}))
    if key in arguments:
        _fail(f"the argument {key!r:.80} is given twice")
    arguments[key] = text if "string" in wanted else _lenient(text)


_SPELLINGS = {"True": True, "False": False, "None": None}


def _lenient(text: str) -> Any:
    """Return a text as JSON, or as it is; templates write constants as Python does."""
    try:
        value, end = _json(text, 0)
    except ToolCallError:
        return _SPELLINGS.get(text.strip(), text)
    return text if text[end:].strip() else value


# -- schemas ----------------------------------------------------------------------------------------------------------

_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    declared = schema.get("type", ())
    return (declared,) if isinstance(declared, str) else tuple(declared)


def _check_value(value: Any, schema: Any, place: str) -> None:
    """Compare a value with the parts of a JSON schema that tools use: type, enum, properties, required and items.

    An argument that is not among the properties is refused, unless ``additionalProperties`` is true.
    """
    if not isinstance(schema, Mapping):  # JSON schemas may also be true or false
        return
    types = _types(schema)
    if types and not any(_CHECKS.get(name, lambda value: True)(value) for name in types):
        _fail(f"{place}{json.dumps(value, ensure_ascii=False):.80} must be of type {' or '.join(types)}")
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(json.dumps(one, ensure_ascii=False) for one in schema["enum"])
        _fail(f"{place}{json.dumps(value, ensure_ascii=False):.80} must be one of {allowed}")
    if isinstance(value, dict) and "properties" in schema:
        for key in schema.get("required", ()):
            if key not in value:
                _fail(f"{place}the argument {key!r} is missing")
        for key, part in value.items():
            if key in schema["properties"]:
                _check_value(part, schema["properties"][key], f"{place}{key}: ")
            elif not schema.get("additionalProperties"):
                _fail(f"{place}there is no argument {key!r:.80}; the arguments are {', '.join(schema['properties'])}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for part in value:
            _check_value(part, schema["items"], place)
