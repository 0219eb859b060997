"""How a chat template shows tools, calls and results: found by rendering a conversation with two calls.

Invariant: a template is said to write calls in a format only if the parser of that format reads the calls from what
the template itself writes. A template that does not gets the tools in the system message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Protocol

from agentkit.errors import RendererError
from agentkit.tool_calls import FORMATS, Tool, ToolCall, ToolCallError, ToolFormat, ToolFormatName
from agentkit.trainers.rollout.tools import ToolUse
from agentkit.types import Message

SYSTEM, OBSERVATION, ANSWER = "Qsystem7Q", "Qfirst1Q", "Qanswer5Q"
"""Texts for conversations that only probe the template. Templates may trim messages, so there is no white space at
their ends."""
CALLS = (ToolCall("Qtool6Q", {"Qkey6Q": "Qvalue6Q"}), ToolCall("Qtool6Q", {"Qkey6Q": "Qvalue8Q"}))
RESULTS = ("Qresult2Q", "Qresult9Q")
_DESCRIPTION = "Qdescription6Q"
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "Qtool6Q",
        "description": _DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"Qkey6Q": {"type": "string", "description": "Qargument6Q"}},
            "required": ["Qkey6Q"],
        },
    },
}
OPENING = (Message("system", SYSTEM), Message("user", OBSERVATION))
CONVERSATION = (
    *OPENING,
    Message("assistant", "", CALLS[:1]),
    Message("tool", RESULTS[0]),
    Message("assistant", "", CALLS[1:]),
    Message("tool", RESULTS[1]),
)


class Template(Protocol):
    """What is needed of ``ChatTemplate``."""

    given_tools: list[Tool] | None
    arguments_as_text: bool

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> str: ...

    def first_special(self, text: str) -> str | None: ...

    def readable(self, text: str) -> str: ...


def find_tool_use(template: Template, tools: tuple[Tool, ...], wanted: ToolFormatName | Literal["auto"]) -> ToolUse:
    """Return how ``tools`` are used with ``template``, and set what the template is given accordingly.

    Raises:
        RendererError: the template does not write calls in the format ``wanted``.
    """
    for template.arguments_as_text in (False, True):
        for format in FORMATS.values() if wanted == "auto" else [FORMATS[wanted]]:
            try:
                template.given_tools = [TOOL]
                listed = _lists_tools(template, format)
                template.given_tools = list(tools)
                _, after = written(template, CALLS[0], format)
            except (RendererError, ToolCallError):
                continue
            return ToolUse(
                tools,
                format,
                native=True,
                listed=listed,
                end=template.first_special(after),
                write=lambda call, format=format: written(template, call, format)[0],
                readable=template.readable,
            )
    template.given_tools, template.arguments_as_text = None, False
    if wanted in ("auto", "hermes"):
        return ToolUse(tools, FORMATS["hermes"], native=False, listed=False)
    raise RendererError(
        f"the chat template does not write tool calls in the format {wanted}: set model.tool_format=auto, or hermes to "
        "describe the tools in the system message"
    )


def written(template: Template, call: ToolCall, format: ToolFormat) -> tuple[str, str]:
    """Return the answer that makes ``call``, and what the template puts between it and the result.

    Raises:
        RendererError: the template does not show it.
    """
    text = template.render([*OPENING, Message("assistant", "", (call,)), Message("tool", RESULTS[0])])
    return _between(text, OBSERVATION, RESULTS[0], template.render(OPENING), format)


def _lists_tools(template: Template, format: ToolFormat) -> bool:
    """Return whether the template shows ``TOOL``.

    Raises:
        RendererError, ToolCallError: it does not write two calls in ``format``, with their results.
    """
    whole = template.render(CONVERSATION)
    marks = (OBSERVATION, *RESULTS)
    if any(whole.count(mark) != 1 for mark in (SYSTEM, *marks)):
        raise RendererError("the chat template does not show results of tools")
    for place, call in enumerate(CALLS):
        start, end = marks[place : place + 2]
        prompt = template.render(CONVERSATION[: 2 + 2 * place])
        answer, _ = _between(whole, start, end, prompt, format)
        if format.read(answer, [TOOL]).calls != (call,):
            raise RendererError("the chat template does not show a call")
    return _DESCRIPTION in whole


def _between(text: str, start: str, end: str, prompt: str, format: ToolFormat) -> tuple[str, str]:
    """Return the answer between two texts of messages, and what follows it up to the second.

    The answer begins where ``text`` leaves ``prompt``, the conversation up to the first text and the generation prompt.
    Raises ``RendererError`` if there is no call.
    """
    between = text.partition(start)[2].rpartition(end)[0]
    opening = prompt.rpartition(start)[2]
    same = next((k for k, (a, b) in enumerate(zip(between, opening, strict=False)) if a != b), None)
    between = between[min(len(between), len(opening)) if same is None else same :]
    closes = [found.end() for found in re.finditer(format.close, between)]
    if not closes:
        raise RendererError("the chat template does not show a call")
    return between[: closes[-1]], between[closes[-1] :]
