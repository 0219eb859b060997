"""Tools in a conversation: how a model is told of them, and how its calls become actions.

Invariant: an answer is either one call of a declared tool with fitting arguments, which is the action, or it is invalid
and its author is told why. ``parse(format(actions))`` gives ``actions``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentkit.errors import ConfigError
from agentkit.tool_calls import (
    FORMATS,
    Tool,
    ToolAnswer,
    ToolCall,
    ToolCallError,
    ToolFormat,
    action_of,
    call_of,
    check_call,
    read_calls,
    write_hermes,
)
from agentkit.trainers.rollout.parser import ParsedAnswer

_ONE_CALL = "End your answer with one tool call."
_FORM = '<tool_call>\n{"name": the tool, "arguments": an object with its arguments}\n</tool_call>'


@dataclass(frozen=True)
class ToolUse:
    """How the tools of an environment are used with a model."""

    tools: tuple[Tool, ...]
    format: ToolFormat
    native: bool
    """Whether calls and results are messages of their own, instead of texts of the assistant and the user."""
    listed: bool
    """Whether the model is told of the tools without the system message."""
    end: str | None = None
    """The special token that ends an answer with a call; None: that of any answer."""
    write: Callable[[ToolCall], str] = write_hermes
    """Returns the answer that makes a call."""
    readable: Callable[[str], str] = str
    """Returns an answer without calls as the text of a message."""

    def read(self, text: str) -> ToolAnswer:
        """Return content and calls of an answer. Raises ``ToolCallError``."""
        return read_calls(text, self.format.name, self.tools)


def for_endpoint(tools: Sequence[Tool]) -> ToolUse | None:
    """Return the use of ``tools`` with a chat endpoint, which lists them itself and returns calls apart; None without
    tools."""
    if not tools:
        return None
    return ToolUse(tuple(tools), FORMATS["hermes"], native=True, listed=True)


class ToolParser:
    """Parser of answers with one tool call, for environments with tools."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use

    @property
    def instructions(self) -> str:
        """How to answer, and the tools if nothing else lists them."""
        parts = []
        if not self._use.listed:
            parts += ["You can call these tools:", *(json.dumps(tool, ensure_ascii=False) for tool in self._use.tools)]
        parts.append(_ONE_CALL if self._use.native else f"{_ONE_CALL[:-1]}, in this form:\n{_FORM}")
        return "\n".join(parts)

    def parse(self, text: str) -> ParsedAnswer:
        """Return the call in ``text`` as an action; ``problem`` if there is none."""
        try:
            calls = self._use.read(text).calls
            if len(calls) != 1:
                raise ToolCallError(f"it has {len(calls)} calls" if calls else "it has none")
            check_call(calls[0], self._use.tools)
        except ToolCallError as error:
            problem = f"Your answer has no valid tool call: {error}. {_ONE_CALL}"
            return ParsedAnswer((), valid=False, problem=problem)
        return ParsedAnswer((action_of(calls[0]),), valid=True)

    def format(self, actions: Sequence[str]) -> str:
        """Return the answer that makes the call in ``actions``, the target of imitation. Raises ``ValueError`` if it is
        not one call."""
        if len(actions) != 1:
            raise ValueError(f"an answer makes one tool call, not {len(actions)}")
        call = call_of(actions[0], self._use.tools)
        text = self._use.write(call)
        if self.parse(text).actions != (action_of(call),):
            raise ValueError(
                f"the chat template writes the call {actions[0]:.200} as {text!r:.200}, which reads otherwise"
            )
        return text


def check_settings(env_id: str, parser: str, actions_per_turn: int) -> None:
    """Raise ``ConfigError`` if settings of answers do not fit an environment with tools."""
    if parser != "tagged":
        raise ConfigError(
            f"env.parser={parser} has no effect: {env_id} has tools, and an answer is a tool call; drop the setting"
        )
    if actions_per_turn != 1:
        raise ConfigError(
            f"{env_id} has tools, and an answer makes one call: actions_per_turn={actions_per_turn} must be 1"
        )
