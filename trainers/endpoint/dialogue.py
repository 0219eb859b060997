"""Conversations of chat APIs as token ids, and sampled ids as messages.

Invariant: ``continuation`` returns ids only if the chat template shows the longer conversation as the earlier one, then
the sampled answer, then these ids. So sampled tokens are kept, and the model reads what the template would have shown.
The white space around an answer, and the spelling of the JSON in its calls, are those that the model chose.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentkit.config import ModelConfig
from agentkit.tool_calls import Tool, ToolCallError, write_hermes
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.template import int32
from agentkit.types import IntArray, Message

_FORM = '<tool_call>\n{"name": the tool, "arguments": an object with its arguments}\n</tool_call>'
_MOST_DIALOGUES = 8
"""Lists of tools whose dialogues are kept; each holds a copy of the tokenizer."""


class Dialogue:
    """The chat format of a model, for one list of tools.

    Args:
        tokenizer: of transformers, with a chat template.
        model: settings of the template and of tool calls; not those of the history.
        tools: functions that the model may call.

    Raises:
        RendererError: the template does not fit.
    """

    def __init__(self, tokenizer: Any, model: ModelConfig, tools: Sequence[Tool] = ()) -> None:
        self.tools = tuple(tools)
        self._renderer = ChatRenderer(
            tokenizer, rerenders=True, arguments=model.template_arguments, tools=tools, tool_format=model.tool_format
        )
        self._template, self._use = self._renderer.template, self._renderer.tools
        self.stop_ids = self._renderer.stop_ids
        """Ids after which generation ends."""
        ends = [token for token, id_ in self._template.special.items() if id_ in self.stop_ids]
        self._end = re.compile("|".join(map(re.escape, sorted(ends, key=len, reverse=True))))

    def prompt(self, messages: Sequence[Message]) -> IntArray:
        """Return the ids of a conversation and the generation prompt, int32 ``[p]``.

        Raises:
            RendererError: the template refuses the conversation.
        """
        return self._template.prompt_ids(self._shown(messages))

    def continuation(
        self, messages: Sequence[Message], answer: Message, ids: IntArray, added: Sequence[Message]
    ) -> IntArray | None:
        """Return the ids between a sampled answer and the next one, int32 ``[p]``.

        Args:
            messages: the conversation before the answer.
            answer: the answer as a message.
            ids: the answer as it was sampled.
            added: the messages after it.

        Returns:
            The rest of the answer's end, the added messages and the generation prompt; None if the template shows the
            earlier conversation or the answer otherwise than the model saw and sampled them.

        Raises:
            RendererError: the template refuses the conversation.
        """
        before = self._template.render_disguised(self._shown(messages))
        whole = self._template.render_disguised(self._shown([*messages, answer, *added]))
        if not whole.startswith(before):
            return None
        rest = whole[len(before) :]
        end = self._end.search(rest)
        if end is None or not _alike(self._read(self._template.undisguised(rest[: end.start()])), self.answer(ids)):
            return None
        closed = len(ids) > 0 and int(ids[-1]) == self._template.special[end.group()]
        return int32(self._template.encode_disguised(rest[end.end() if closed else end.start() :]))

    def answer(self, ids: Sequence[int] | np.ndarray, stops: Sequence[str] = ()) -> Message:
        """Return sampled ids as a message, up to the first of ``stops``. Calls that cannot be read stay text."""
        text = self._renderer.decode(ids)
        return self._read(text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))])

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, with special tokens spelled out."""
        return self._template.spell(ids)

    def _read(self, text: str) -> Message:
        if self._use is None:
            return Message("assistant", text)
        try:
            answer = self._use.read(text)
        except ToolCallError:
            answer = None
        if answer is not None and answer.calls:
            return Message("assistant", answer.content, answer.calls)
        return Message("assistant", self._use.readable(text) if self._use.native else text)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return what the template is given: with the tools and calls as texts if it has no form for them."""
        use = self._use
        if use is None:
            return list(messages)
        shown = list(messages) if use.native else [_as_text(message) for message in messages]
        if use.listed:
            return shown
        listing = [json.dumps(tool, ensure_ascii=False) for tool in use.tools]
        text = "\n".join(["You can call these tools:", *listing])
        if not use.native:
            text += f"\nTo call one, end your answer with a call of this form:\n{_FORM}"
        if shown and shown[0].role == "system":
            return [Message("system", f"{shown[0].content}\n\n{text}"), *shown[1:]]
        return [Message("system", text), *shown]


class Dialogues:
    """The dialogues of one model with any tools.

    Args:
        tokenizer: as in ``Dialogue``.
        model: as in ``Dialogue``.
    """

    def __init__(self, tokenizer: Any, model: ModelConfig) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._known: OrderedDict[str, Dialogue] = OrderedDict()

    def of(self, tools: Sequence[Tool]) -> Dialogue:
        """Return the dialogue with these tools. Raises ``RendererError``."""
        key = json.dumps(list(tools))
        if key not in self._known:
            self._known[key] = Dialogue(self._tokenizer, self._model, tools)
            if len(self._known) > _MOST_DIALOGUES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def _as_text(message: Message) -> Message:
    """Return a call or the result of one as a text of the assistant or the user."""
    if message.role == "tool":
        return Message("user", message.content)
    calls = [write_hermes(call) for call in message.calls]
    return Message(message.role, "\n".join([message.content] * bool(message.content) + calls)) if calls else message


def _alike(shown: Message, sampled: Message) -> bool:
    return shown.content.strip() == sampled.content.strip() and shown.calls == sampled.calls
