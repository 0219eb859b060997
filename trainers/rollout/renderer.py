"""Conversion of observations to prompt tokens, in the chat format of the model.

Invariant: with appending, tokens are only added, and sampled tokens stay unchanged. Otherwise each prompt is the
template's own view of the conversation, and turns do not share tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from agentkit.config import ModelConfig
from agentkit.errors import RendererError
from agentkit.tool_calls import Tool, ToolCallError, ToolFormatName
from agentkit.trainers.rollout.appending import Parts, no_end_of_turn, parts_of
from agentkit.trainers.rollout.history import conversation, role_after
from agentkit.trainers.rollout.summary import Summarize, make_summary
from agentkit.trainers.rollout.template import ChatTemplate, changes, int32
from agentkit.trainers.rollout.tool_probing import ANSWER, CALLS, OBSERVATION, OPENING
from agentkit.types import IntArray, Message, Turn

_CACHE_ENTRIES = 4096
"""Number of observations whose tokens are cached; texts of small games repeat often."""
_CACHE_CHARACTERS = 2048
"""Longer texts rarely repeat and are not cached, which bounds the cache's memory."""


class ChatRenderer:
    """Renderer of chat tokens for a tokenizer with a chat template.

    Returned arrays are shared and read-only.

    Args:
        tokenizer: of transformers.
        rerenders: render the whole conversation for each prompt, instead of appending turns.
        window: with ``rerenders``: maximum number of earlier turns in a prompt; None shows all.
        summarize: with ``window``: makes a text of the turns that are left out.
        arguments: further variables of the template.
        tools: the tools that the environment has.
        tool_format: how the model writes calls (``ChatTemplate``).

    Raises:
        RendererError: the tokenizer has no usable template, or turns cannot be appended to it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        rerenders: bool = False,
        window: int | None = None,
        summarize: Summarize | None = None,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        tool_format: ToolFormatName | Literal["auto"] = "auto",
    ) -> None:
        self.template = ChatTemplate(tokenizer, arguments, tools, tool_format)
        self.tools = self.template.tools
        """How tools are used; None if there are none."""
        self.rerenders = rerenders
        """Whether prompts are whole conversations (``Trajectory.rerendered``)."""
        self._window, self._summarize = window, summarize
        self._parts: Parts | None = None if rerenders else parts_of(self.template)
        token = _end_of_turn(self.template) if self._parts is None else self._parts.end_of_turn
        self.end_of_turn: int = self.template.special[token]
        """The id that ends an answer; the policy samples it."""
        eos = self.template.eos_id
        self._call_end = self.end_of_turn
        if self.tools is not None and self.tools.end is not None:
            self._call_end = self.template.special[self.tools.end]
        ends = [self.end_of_turn, self._call_end, *([eos] if eos is not None else [])]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """Ids after which generation ends."""
        self._cache: OrderedDict[tuple[str, str], IntArray] = OrderedDict()

    def prompt(self, system: str, turns: Sequence[Turn], observation: str) -> IntArray:
        """Return the ids up to and including the next generation prompt, int32 ``[p]``.

        With ``rerenders``, these are all ids that the engine is to see; otherwise those after the last action.
        """
        if self.rerenders:
            messages = conversation(system, turns, observation, self._window, self._summarize, self.tools)
            return self.template.prompt_ids(messages)
        if not turns:
            return self.first(system, observation)
        closed = int(turns[-1].action_ids[-1]) == self.end_of_turn
        if role_after(turns[-1], self.tools) == "tool":
            return self.result(observation, closed=closed)
        return self.next(observation, closed=closed)

    def first(self, system: str, observation: str) -> IntArray:
        """Return the ids of the start, int32 ``[p]``: rules, first observation and the generation prompt."""
        parts = self._appendable
        return self._cached(parts.head + system + parts.after_system, observation)

    def next(self, observation: str, *, closed: bool) -> IntArray:
        """Return the ids after an action, up to and including the next generation prompt, int32 ``[p]``.

        ``closed``: the action ended with ``end_of_turn``; otherwise the closing ids come first.
        """
        parts = self._appendable
        return self._cached(parts.open if closed else parts.close + parts.open, observation)

    def result(self, text: str, *, closed: bool) -> IntArray:
        """As ``next``, for the result of a tool: the renderer has tools, and a call came before."""
        parts = self._appendable
        assert parts.called is not None
        before = [*OPENING, Message("assistant", "", CALLS[:1])]
        ids = self.template.ids_after(parts.called, before, Message("tool", text))
        return int32(ids if closed else [*self.template.encode(parts.close), *ids])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids`` without special tokens; with them, except the last, if calls are made of them."""
        if self.tools is None or not self.tools.native:
            return self.template.decode(ids)
        end = len(ids)
        while end and int(ids[end - 1]) in self.stop_ids:
            end -= 1
        return self.template.spell(ids[:end])

    def encode_answer(self, text: str) -> IntArray:
        """Return the ids of an answer as the policy would produce it, including the id that ends it, int32 ``[a]``."""
        return int32([*self.template.encode(text), self._call_end if self._is_call(text) else self.end_of_turn])

    def _is_call(self, text: str) -> bool:
        if self._call_end == self.end_of_turn or self.tools is None:
            return False
        try:
            return bool(self.tools.read(text).calls)
        except ToolCallError:
            return False

    @property
    def _appendable(self) -> Parts:
        if self._parts is None:
            raise RendererError("this renderer renders whole conversations: call prompt()")
        return self._parts

    def _cached(self, before: str, content: str) -> IntArray:
        key = (before, content)
        ids = self._cache.get(key)
        if ids is not None:
            self._cache.move_to_end(key)
            return ids
        ids = self._tokens(before, content, self._appendable.tail)
        if len(content) <= _CACHE_CHARACTERS:
            self._cache[key] = ids
            if len(self._cache) > _CACHE_ENTRIES:
                self._cache.popitem(last=False)
        return ids

    def _tokens(self, before: str, content: str, after: str) -> IntArray:
        template = self.template
        if not template.has_control_tokens(content):
            return int32(template.encode(before + content + after))
        return int32([*template.encode(before), *template.encode_plain(content), *template.encode(after)])


def make_renderer(model: ModelConfig, tokenizer: Any, max_turns: int, tools: Sequence[Tool] = ()) -> ChatRenderer:
    """Return the renderer that ``model.history`` asks for, for an environment with ``tools``.

    ``auto``, and ``append`` for tasks of a single turn, append if that is exact, and render again otherwise.

    Raises:
        RendererError: the template does not fit.
    """
    settings: dict[str, Any] = {"arguments": model.template_arguments, "tools": tools, "tool_format": model.tool_format}
    if model.history in ("auto", "append"):
        try:
            return ChatRenderer(tokenizer, **settings)
        except RendererError:
            if model.history == "append" and max_turns > 1:
                raise
    return ChatRenderer(tokenizer, rerenders=True, window=model.shown_turns, summarize=make_summary(model), **settings)


def _end_of_turn(template: ChatTemplate) -> str:
    """Return the token that ends an answer: the template's, or that of the tokenizer."""
    answered = [*OPENING, Message("assistant", ANSWER)]
    last = template.render(answered, prompt=False)
    earlier = template.render([*answered, Message("user", OBSERVATION)])
    for text in (last, earlier):
        if text.count(ANSWER) != 1:
            raise changes(ANSWER, text)
        if token := template.first_special(text.partition(ANSWER)[2]):
            return token
    for token, id_ in template.special.items():
        if id_ == template.eos_id:
            return token
    raise no_end_of_turn(last.partition(ANSWER)[2])
