"""Declared tools as methods from which transformers derives the same declarations.

Invariant: ``transformers.utils.get_json_schema`` gives name, descriptions, types, choices and required arguments of the
tool. Of deeper schemas (the fields of an object) it gives the type ``object``, and the description shows the schema.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from agentkit.errors import ConfigError
from agentkit.tool_calls import Tool, ToolCall, action_of

RESERVED = frozenset({"reset", "get_reward", "voided"})
_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_MARKUP = re.compile(r"(Args|Returns|Raises|\(choices):")
"""What transformers gives a meaning in docstrings."""
_NO_ARGUMENTS = frozenset({"self", "Args", "Returns", "Raises"})


def tool_method(tool: Tool, act: Callable[[Any, str], str]) -> Callable[..., str]:
    """Return a typed, documented method that carries out calls of ``tool``.

    Its signature is that of the tool, but it accepts any keyword arguments: the environment checks them, and its answer
    tells the model what is wrong.

    Args:
        tool: a declaration that ``agentkit.tool_calls.check_tools`` has checked.
        act: called with the instance and the call as an action; returns the text for the model.

    Raises:
        ConfigError: Python has no such method or argument.
    """
    function = tool["function"]
    name, parameters = function["name"], function.get("parameters") or {}
    properties, required = parameters.get("properties", {}), parameters.get("required", ())
    if name in RESERVED or name.startswith("_"):
        raise ConfigError(f"TRL offers no tool of the name {name!r}: rename the tool, or train with RolloutFunc")
    for argument in properties:
        if not argument.isidentifier() or keyword.iskeyword(argument) or argument in _NO_ARGUMENTS:
            raise ConfigError(
                f"the tool {name!r} has the argument {argument!r}, a name that Python or its docstrings do not "
                "allow: rename it, or train with RolloutFunc"
            )

    def method(self: Any, **arguments: Any) -> str:
        return act(self, action_of(ToolCall(name, arguments)))

    hints = {argument: _hint(schema) for argument, schema in properties.items()}
    # Arguments with a default come last in a signature.
    ordered = sorted(hints, key=lambda argument: argument not in required)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signed = [
        inspect.Parameter(
            argument,
            kind,
            annotation=hints[argument],
            default=inspect.Parameter.empty if argument in required else None,
        )
        for argument in ordered
    ]
    method.__name__ = method.__qualname__ = name
    method.__doc__ = docstring(function["description"], {a: _description(a, s) for a, s in properties.items()})
    method.__annotations__ = {**hints, "return": str}
    method.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter("self", kind), *signed], return_annotation=str
    )
    return method


def docstring(description: str, arguments: Mapping[str, str]) -> str:
    """Return a docstring in Google's style, from which transformers reads exactly these descriptions."""
    lines = [_plain(description.strip()) or "No description."]
    if arguments:
        lines += ["", "Args:", *(f"    {name}: {_plain(text)}" for name, text in arguments.items())]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a text without what has a meaning in a docstring."""
    return _MARKUP.sub(r"\1 :", text)


def _description(argument: str, schema: Any) -> str:
    """Return the description of an argument in one line; transformers requires one."""
    described = schema.get("description") if isinstance(schema, Mapping) else None
    text = " ".join(str(described or argument).split())
    deep = isinstance(schema, Mapping) and any(key in str(schema) for key in ("'properties'", "'anyOf'", "'oneOf'"))
    return f"{text} (JSON schema: {json.dumps(schema, ensure_ascii=False)})" if deep else text


def _hint(schema: Any) -> Any:
    """Return the Python type that transformers converts to ``schema``."""
    if not isinstance(schema, Mapping):
        return Any
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(type(value) in (str, int, bool, type(None)) for value in choices):
        return Literal[tuple(choices)]
    names = schema.get("type", ())
    hints = [_TYPES[name] for name in ([names] if isinstance(names, str) else names) if name in _TYPES]
    if isinstance(schema.get("items"), Mapping):
        hints = [list[_hint(schema["items"])] if hint is list else hint for hint in hints]
    return Union[tuple(hints)] if hints else Any  # noqa: UP007 (a union of a computed number of types)
