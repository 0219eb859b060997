"""A model's chat template and tokenizer: conversations as text and as token ids.

Invariant: the texts of messages never become control tokens and never steer the template. A template sees each text in
other letters (``_disguised``), so it finds no marker in it. Where the text then contains a control token, the token is
encoded as plain characters. The exception are the tags ``<think>`` and ``</think>`` in the model's own answers, which
templates look for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentkit.errors import RendererError
from agentkit.types import IntArray, Message

if TYPE_CHECKING:  # playing against an endpoint needs no tokenizer
    from tokenizers import Tokenizer

# One text is encoded at a time. Handing it to another thread costs more than to encode it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SYSTEM, OBSERVATION, ANSWER = "Qsystem7Q", "Qfirst1Q", "Qanswer5Q"
"""Texts for conversations that only probe the template. Templates may trim messages, so there is no white space at
their ends."""

_LETTERS = 0xF0000
"""Start of a private area of Unicode; a disguised character is this far from the real one."""
_THINKING_TAG = re.compile(r"(</?think>)")
_OPEN_THINKING = re.compile(r"<think>\s*$")


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: of transformers, with a fast tokenizer and a chat template.
        arguments: further variables of the template.

    Raises:
        RendererError: the tokenizer has no template, or one that does not show the system message and the observation.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
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
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
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
        self._in_parts, self.system_is_merged = self._find_form()
        opening = [Message("system", SYSTEM), Message("user", OBSERVATION)]
        prompt = self.render(opening)
        whole = self.render([*opening, Message("assistant", ANSWER), opening[1]])
        # Some tokenizers do not declare the tokens of the roles as special.
        control = {token.content for token in added.values() if token.special or token.content in whole}
        self._control_token = _any_of(control)
        letters = {chr(code) for code in range(0x21, 0x7F)} | {letter for letter in "".join(control) if letter.strip()}
        disguise = {ord(letter): chr(_LETTERS + ord(letter)) for letter in letters if ord(letter) < 0x10000}
        self._undisguise = {ord(disguised): chr(code) for code, disguised in disguise.items()}
        self._disguise = disguise | dict.fromkeys(self._undisguise, "\ufffd")
        unclosed = _OPEN_THINKING.search(prompt)
        self._thinks_from = unclosed.group() if unclosed else ""
        self._content_id = self._find_content_id(prompt)

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        """Render a conversation that begins with a system message.

        Args:
            messages: their contents are given to the template as they are.
            prompt: end with the generation prompt.

        Raises:
            RendererError: the template fails.
        """
        if self.system_is_merged:
            system, first, *others = messages
            messages = [Message("user", f"{system.content}\n\n{first.content}"), *others]
        return self._apply(messages, prompt)

    def prompt_ids(self, messages: Sequence[Message]) -> IntArray:
        """Return the ids of a conversation and the generation prompt, int32 ``[p]``."""
        return self._encode_disguised(self.render([self._disguised(message) for message in messages]))

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

    def first_special(self, text: str) -> str | None:
        """Return the first special token in ``text``; the longest one of several there."""
        found = self._special_token.search(text)
        return found.group() if found else None

    # -- texts of messages ----------------------------------------------------------------------------------------

    def _disguised(self, message: Message) -> Message:
        if message.role != "assistant":
            return Message(message.role, message.content.translate(self._disguise))
        # The generation prompt may open the reasoning; the answer then only closes it.
        pieces = _THINKING_TAG.split(message.content)
        content = "".join(
            piece if index % 2 and piece not in self.special else piece.translate(self._disguise)
            for index, piece in enumerate(pieces)
        )
        return Message("assistant", self._thinks_from + content)

    def _encode_disguised(self, rendered: str) -> IntArray:
        text = rendered.translate(self._undisguise)
        ids: list[int] = []
        done = 0
        for token in self._control_token.finditer(text):
            start, end = token.span()
            if text[start:end] != rendered[start:end]:  # some of it is from a message
                ids += [*self.encode(text[done:start]), *self.encode_plain(text[start:end])]
                done = end
        return int32([*ids, *self.encode(text[done:])])

    # -- reading the template -------------------------------------------------------------------------------------

    def _apply(self, messages: Sequence[Message], prompt: bool) -> str:
        def content(text: str) -> Any:
            return [{"type": "text", "text": text}] if self._in_parts else text

        try:
            return self._tokenizer.apply_chat_template(
                [{"role": message.role, "content": content(message.content)} for message in messages],
                tokenize=False,
                add_generation_prompt=prompt,
                **self._arguments,
            )
        except Exception as error:
            raise RendererError(f"the chat template failed on a plain conversation: {error}") from error

    def _find_form(self) -> tuple[bool, bool]:
        """Return whether contents are lists of parts, and whether the system message opens the first user message
        because the template has no system role."""
        problem = None
        for self._in_parts, self.system_is_merged in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text = self.render([Message("system", SYSTEM), Message("user", OBSERVATION)])
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
        messages = [Message("system", SYSTEM), Message("user", OBSERVATION), Message("assistant", ANSWER)]
        text = self.render(messages, prompt=False)
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
