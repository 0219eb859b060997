"""A model's chat template and tokenizer: conversations as text and as token ids.

Invariant: the texts of messages never become control tokens and never steer the template. A template sees each text in
other letters (``_disguised``), so it finds no marker in it. Where the text then contains a control token, the token is
encoded as plain characters. The exception are the tags ``<think>`` and ``</think>`` in the model's own answers, which
templates look for. Arguments and results of tools keep quotation marks and backslashes, because some templates escape
them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentkit.errors import RendererError
from agentkit.tool_calls import Tool, ToolCall, ToolFormatName
from agentkit.trainers.rollout.tool_probing import ANSWER, CONVERSATION, OBSERVATION, OPENING, SYSTEM, find_tool_use
from agentkit.trainers.rollout.tools import ToolUse
from agentkit.types import IntArray, Message

if TYPE_CHECKING:  # playing against an endpoint needs no tokenizer
    from tokenizers import Tokenizer

# One text is encoded at a time. Handing it to another thread costs more than to encode it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LETTERS = 0xF0000
"""Start of a private area of Unicode; a disguised character is this far from the real one."""
_THINKING_TAG = re.compile(r"(</?think>)")
_OPEN_THINKING = re.compile(r"<think>\s*$")


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of transformers, with a fast tokenizer and a chat template.
        arguments: further variables of the template.
        tools: the tools that the environment has.
        tool_format: how the model writes calls; ``auto``: as the template does, otherwise as ``hermes``.

    Raises:
        RendererError: the tokenizer has no template, or one that does not show the system message and the observation,
            or that does not write calls in ``tool_format``.
    """

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        tool_format: ToolFormatName | Literal["auto"] = "auto",
    ) -> None:
        from tokenizers import Tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise RendererError(
                f"{type(tokenizer).__name__} has no fast tokenizer (tokenizers.Tokenizer) behind it; convert the "
                "model's tokenizer to a tokenizer.json"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise RendererError(
                f"{type(tokenizer).__name__} has no chat template: use the model's instruct variant, or set "
                "model.chat_template"
            )
        self.tokenizer, self._arguments = tokenizer, dict(arguments or {})
        # A copy, because padding or truncation may be set on the original.
        self._encoder = Tokenizer.from_str(backend.to_str())
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._literal: Tokenizer | None = None
        added = self._encoder.get_added_tokens_decoder()
        self.special: dict[str, int] = {token.content: id_ for id_, token in added.items() if token.special}
        """Special tokens and their ids."""
        self.eos_id: int | None = tokenizer.eos_token_id
        self._special_token = _any_of(self.special)
        self.given_tools: list[Tool] | None = None
        """The tools that the template is given."""
        self.arguments_as_text = False
        """Whether the template is given the arguments of calls as JSON texts."""
        self._in_parts, self.system_is_merged = self._find_form()
        self.tools: ToolUse | None = find_tool_use(self, tuple(tools), tool_format) if tools else None
        """How tools are used; None if there are none."""
        prompt = self.render(OPENING)
        whole = self.render([*OPENING, Message("assistant", ANSWER), OPENING[1]])
        if self.tools is not None and self.tools.native:
            whole += self.render(CONVERSATION)
        # Some tokenizers do not declare the tokens of the roles as special.
        control = {token.content for token in added.values() if token.special or token.content in whole}
        self._control_token = _any_of(control)
        shown = json.dumps(self.given_tools or [], ensure_ascii=False)
        if (token := self._control_token.search(shown)) is not None:
            raise RendererError(f"the description of a tool contains the control token {token.group()!r}: reword it")
        letters = {chr(code) for code in range(0x21, 0x7F)} | {letter for letter in "".join(control) if letter.strip()}
        disguise = {ord(letter): chr(_LETTERS + ord(letter)) for letter in letters if ord(letter) < 0x10000}
        self._undisguise = {ord(disguised): chr(code) for code, disguised in disguise.items()}
        self._disguise = disguise | dict.fromkeys(self._undisguise, "\ufffd")
        self._disguise_of_tools = {code: to for code, to in self._disguise.items() if chr(code) not in '"\\'}
        unclosed = _OPEN_THINKING.search(prompt)
        self._thinks_from = unclosed.group() if unclosed else ""
        self._content_id = self._find_content_id(prompt)

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """Render a conversation.

        Args:
            messages: their contents are given to the template as they are.
            prompt: end with the generation prompt.

        Raises:
            RendererError: the template fails.
        """
        if self.system_is_merged and messages and messages[0].role == "system":
            system, *others = messages
            if others and others[0].role == "user":
                first, *others = others
                system = Message("user", f"{system.content}\n\n{first.content}")
            messages = [Message("user", system.content), *others]
        return self._apply(messages, prompt)

    def prompt_ids(self, messages: Sequence[Message]) -> IntArray:
        """Return the ids of a conversation and the generation prompt, int32 ``[p]``."""
        return int32(self.encode_disguised(self.render_disguised(messages)))

    def render_disguised(self, messages: Sequence[Message]) -> str:
        """Render a conversation and the generation prompt; the texts of messages are in other letters."""
        return self.render([self._disguised(message) for message in messages])

    def undisguised(self, rendered: str) -> str:
        """Return a text that ``render_disguised`` returned, or a part of it, in its own letters."""
        return rendered.translate(self._undisguise)

    def encode_disguised(self, rendered: str) -> list[int]:
        """Return the ids of a text that ``render_disguised`` returned, or of a part of it."""
        text = self.undisguised(rendered)
        ids: list[int] = []
        done = 0
        for token in self._control_token.finditer(text):
            start, end = token.span()
            if text[start:end] != rendered[start:end]:  # some of it is from a message
                ids += [*self.encode(text[done:start]), *self.encode_plain(text[start:end])]
                done = end
        return [*ids, *self.encode(text[done:])]

    def ids_after(self, start: str, before: Sequence[Message], message: Message) -> list[int]:
        """Return the ids that follow ``start`` if ``message`` follows ``before``, with the generation prompt.

        Args:
            start: what the template renders first.
            before: trusted messages.
            message: the last message.
        """
        rendered = self.render([*before, self._disguised(message)])
        assert rendered.startswith(start), "the start does not depend on the text of the last message"
        return self.encode_disguised(rendered[len(start) :])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a trusted text, in which control tokens count."""
        # Only the batch call skips character offsets, which are not needed.
        return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text; control tokens in it become plain characters."""
        if not self.has_control_tokens(text):
            return self.encode(text)
        if self._literal is None:
            settings = json.loads(self._encoder.to_str())
            for token in settings["added_tokens"]:
                token["special"] = True
            self._literal = type(self._encoder).from_str(json.dumps(settings))
            self._literal.encode_special_tokens = True
        return self._literal.encode(text, add_special_tokens=False).ids

    def has_control_tokens(self, text: str) -> bool:
        return self._control_token.search(text) is not None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids`` without special tokens.

        If the template has a token that begins the content of a message (GPT-OSS, after the name of the channel), this
        is the text after the last one.
        """
        answer = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._content_id is not None and self._content_id in answer:
            answer = answer[len(answer) - answer[::-1].index(self._content_id) :]
        return self._encoder.decode(answer, skip_special_tokens=True)

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``, with special tokens spelled out."""
        return self._encoder.decode(list(map(int, ids)), skip_special_tokens=False)

    def readable(self, text: str) -> str:
        """Return what ``decode`` gives for an answer that ``spell`` returned."""
        if self._content_id is not None:
            text = text.rpartition(self.spell([self._content_id]))[2]
        return self._special_token.sub("", text)

    def first_special(self, text: str) -> str | None:
        """Return the first special token in ``text``; the longest one of several there."""
        found = self._special_token.search(text)
        return found.group() if found else None

    # -- texts of messages ----------------------------------------------------------------------------------------

    def _disguised(self, message: Message) -> Message:
        if message.role == "tool":
            return Message("tool", self._disguised_value(message.content))
        if message.role != "assistant":
            return Message(message.role, message.content.translate(self._disguise))
        # The generation prompt may open the reasoning; the answer then only closes it.
        pieces = _THINKING_TAG.split(message.content)
        content = "".join(
            piece if index % 2 and piece not in self.special else piece.translate(self._disguise)
            for index, piece in enumerate(pieces)
        )
        calls = tuple(ToolCall(call.name, self._disguised_value(call.arguments)) for call in message.calls)
        return Message("assistant", self._thinks_from + content, calls)

    def _disguised_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return value.translate(self._disguise_of_tools)
        if isinstance(value, dict):
            return {self._disguised_value(key): self._disguised_value(part) for key, part in value.items()}
        return [self._disguised_value(part) for part in value] if isinstance(value, list) else value

    # -- reading the template -------------------------------------------------------------------------------------

    def _apply(self, messages: Sequence[Message], prompt: bool) -> str:
        tools = {} if self.given_tools is None else {"tools": self.given_tools}
        try:
            return self.tokenizer.apply_chat_template(
                self._as_dicts(messages),
                **tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._arguments,
            )
        except Exception as error:
            raise RendererError(f"the chat template failed on a plain conversation: {error}") from error

    def _as_dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in the form of transformers. Calls are numbered, because some templates need their ids.

        Results of tools are in the order of the calls.
        """
        given: list[dict[str, Any]] = []
        unanswered: list[dict[str, str]] = []
        for message in messages:
            text = message.content
            one: dict[str, Any] = {"role": message.role}
            one["content"] = [{"type": "text", "text": text}] if self._in_parts else text
            if message.calls:
                unanswered = []
            for place, call in enumerate(message.calls):
                last = {"name": call.name, "tool_call_id": f"call{len(given) + place:05d}"}
                unanswered.append(last)
                arguments: Any = call.arguments
                if self.arguments_as_text:
                    arguments = json.dumps(arguments, ensure_ascii=False)
                function = {"name": call.name, "arguments": arguments}
                one.setdefault("tool_calls", []).append(
                    {"type": "function", "id": last["tool_call_id"], "function": function}
                )
            if message.role == "tool" and unanswered:
                one |= unanswered.pop(0) if len(unanswered) > 1 else unanswered[0]
            given.append(one)
        return given

    def _find_form(self) -> tuple[bool, bool]:
        """Return whether contents are lists of parts, and whether the system message opens the first user message
        because the template has no system role."""
        problem = None
        for self._in_parts, self.system_is_merged in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text = self.render(OPENING)
            except RendererError as error:
                problem = problem or error
                continue
            if text.count(SYSTEM) == text.count(OBSERVATION) == 1:
                return self._in_parts, self.system_is_merged
            problem = problem or changes(OBSERVATION if text.count(OBSERVATION) != 1 else SYSTEM, text)
        assert problem is not None
        raise problem

    def _find_content_id(self, prompt: str) -> int | None:
        """Return the token after which the model writes the content, if the generation prompt ends before it."""
        text = self.render([*OPENING, Message("assistant", ANSWER)], prompt=False)
        if not text.startswith(prompt) or text.count(ANSWER) != 1:
            return None
        lead = text[len(prompt) : text.index(ANSWER)]
        tokens = self._special_token.findall(lead)
        return self.special[tokens[-1]] if tokens and lead.endswith(tokens[-1]) else None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def changes(text: str, rendered: str) -> RendererError:
    return RendererError(
        f"the chat template changes or repeats the text of a message ({text!r} became {rendered!r}); use another "
        "template (model.chat_template)"
    )


def int32(ids: Sequence[int]) -> IntArray:
    """Return ``ids`` as a read-only array."""
    array = np.asarray(ids, np.int32)
    array.flags.writeable = False
    return array
