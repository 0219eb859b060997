"""Conversion of observations to prompt tokens, in the chat format of the model.

Invariant: tokens are only appended, and sampled tokens stay unchanged. A chat template is accepted only if rendering a
whole conversation at once gives the same text as appending turn after turn. A template that rewrites or strips earlier
turns (usually reasoning between ``<think>`` tags) is refused, because the model would see another history in training
than in use.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentkit.errors import RendererError
from agentkit.types import IntArray

if TYPE_CHECKING:  # playing against an endpoint needs no tokenizer
    from tokenizers import Tokenizer

# One text is encoded at a time. Handing it to another thread costs more than to encode it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CACHE_ENTRIES = 4096
"""Number of observations whose tokens are cached; texts of small games repeat often."""
_CACHE_CHARACTERS = 2048
"""Longer texts rarely repeat and are not cached, which bounds the cache's memory."""

# Placeholders for the parts of a conversation while the template is probed. They have no white space at their ends,
# because trimming a message is harmless: history is never rendered again.
_SYSTEM, _FIRST, _SECOND, _THIRD = "Qsystem7Q", "Qfirst1Q", "Qsecond2Q", "Qthird3Q"
_PLAIN, _THINKING = "Qanswer5Q", "<think>\nQreason8Q\n</think>\n\nQanswer5Q"


class ChatRenderer:
    """Renderer of chat tokens for a tokenizer with a chat template.

    Returned arrays are shared and read-only. The constructor raises ``RendererError`` for a tokenizer without a
    template, or with one that cannot be used by appending only.
    """

    def __init__(self, tokenizer: Any) -> None:
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
                "tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        # A copy, because padding or truncation may be set on the original.
        self._encoder = Tokenizer.from_str(backend.to_str())
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._literal: Tokenizer | None = None
        added = self._encoder.get_added_tokens_decoder()
        self._special = {token.content: id_ for id_, token in added.items() if token.special}
        self._head, self._after_system, self._tail, self._close, self._open = self._probe()
        self.end_of_turn: int = self._special[self._close_token]
        """The id that ends an answer; the policy samples it."""
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.end_of_turn, *([eos] if eos is not None else [])]))
        """Ids after which generation ends."""
        self._unclosed = self._close + self._open
        self._cache: OrderedDict[tuple[str, str], IntArray] = OrderedDict()

    def first(self, system: str, observation: str) -> IntArray:
        """Return the ids of the start, int32 ``[p]``: rules, first observation and the generation prompt."""
        return self._cached(self._head + system + self._after_system, observation)

    def next(self, observation: str, *, closed: bool) -> IntArray:
        """Return the ids after an action, up to and including the next generation prompt, int32 ``[p]``.

        ``closed``: the action ended with ``end_of_turn``; otherwise the closing ids come first.
        """
        return self._cached(self._open if closed else self._unclosed, observation)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self._encoder.decode(
            ids.tolist() if isinstance(ids, np.ndarray) else list(ids), skip_special_tokens=True
        )

    def encode_answer(self, text: str) -> IntArray:
        """Return the ids of an answer as the policy would produce it, including ``end_of_turn``, int32 ``[a]``."""
        return _array([*self._ids(text), self.end_of_turn])

    def _ids(self, text: str) -> list[int]:
        # Only the batch call skips character offsets, which are not needed.
        return self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _cached(self, before: str, content: str) -> IntArray:
        key = (before, content)
        ids = self._cache.get(key)
        if ids is not None:
            self._cache.move_to_end(key)
            return ids
        ids = self._tokens(before, content, self._tail)
        if len(content) <= _CACHE_CHARACTERS:
            self._cache[key] = ids
            if len(self._cache) > _CACHE_ENTRIES:
                self._cache.popitem(last=False)
        return ids

    def _tokens(self, before: str, content: str, after: str) -> IntArray:
        if not any(token in content for token in self._special):
            return _array(self._ids(before + content + after))
        # An environment's text must not end its message or speak as the model: control tokens in it are encoded as
        # plain characters.
        if self._literal is None:
            self._literal = type(self._encoder).from_str(self._encoder.to_str())
            self._literal.encode_special_tokens = True
        middle = self._literal.encode(content, add_special_tokens=False).ids
        return _array([*self._ids(before), *middle, *self._ids(after)])

    # -- reading the template -------------------------------------------------------------------------------------

    def _render(self, *contents: str, system: str | None = _SYSTEM) -> str:
        """Render user and assistant messages in turn, with a generation prompt after a user message."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        for index, content in enumerate(contents):
            messages.append({"role": ("user", "assistant")[index % 2], "content": content})
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=len(contents) % 2 == 1
            )
        except Exception as error:
            raise RendererError(f"the chat template failed on a plain conversation: {error}") from error

    def _probe(self) -> tuple[str, str, str, str, str]:
        """Return the constant parts of the template: head, after the system text, tail, close, open.

        ``head SYSTEM after_system OBSERVATION tail ANSWER close open OBSERVATION tail ANSWER …``
        """
        merged = ""
        try:
            opening = self._render(_FIRST)
        except RendererError:
            # A template without a system role: the rules open the first user message instead.
            merged = "\n\n"
            opening = self._render(_SYSTEM + merged + _FIRST, system=None)
        head, after_system, tail = self._split(opening, _SYSTEM, _FIRST)

        def conversation(*contents: str) -> str:
            if not merged:
                return self._render(*contents)
            return self._render(_SYSTEM + merged + contents[0], *contents[1:], system=None)

        two = conversation(_FIRST, _PLAIN, _SECOND)
        if not two.startswith(opening + _PLAIN):
            raise self._rewrites(opening + _PLAIN, two)
        bridge, end = self._split(two[len(opening + _PLAIN) :], _SECOND)
        if end != tail:
            raise self._rewrites(tail, end)
        for answer in (_PLAIN, _THINKING):
            appended = opening + answer + bridge + _SECOND + tail + answer + bridge + _THIRD + tail
            rendered = conversation(_FIRST, answer, _SECOND, answer, _THIRD)
            if rendered != appended:
                raise self._rewrites(appended, rendered)
        close, open_ = self._end_of_turn(bridge)
        return head, after_system, tail, close, open_

    def _end_of_turn(self, bridge: str) -> tuple[str, str]:
        """Split the text between an answer and the next observation after the token that ends the answer."""
        found = [(bridge.index(token), token) for token in self._special if token in bridge]
        if not found:
            raise RendererError(
                f"the chat template ends an answer with {bridge!r}, which contains no special token, so the "
                "engine cannot detect the end of an answer; use a template with an end-of-turn token"
            )
        at, self._close_token = min(found, key=lambda item: (item[0], -len(item[1])))
        cut = at + len(self._close_token)
        return bridge[:cut], bridge[cut:]

    @staticmethod
    def _split(text: str, *marks: str) -> list[str]:
        parts = []
        for mark in marks:
            if text.count(mark) != 1:
                raise RendererError(
                    f"the chat template changes or repeats the text of a message ({mark!r} became {text!r}), so that "
                    "turns cannot be appended; use another template"
                )
            before, text = text.split(mark)
            parts.append(before)
        return [*parts, text]

    @staticmethod
    def _rewrites(appended: str, rendered: str) -> RendererError:
        same = next(
            (i for i, (a, b) in enumerate(zip(appended, rendered, strict=False)) if a != b),
            min(len(appended), len(rendered)),
        )
        what = "strips the reasoning of" if "Qreason8Q" in appended and "Qreason8Q" not in rendered else "rewrites"
        here = slice(max(0, same - 20), same + 40)
        return RendererError(
            f"the chat template {what} earlier turns: appending a turn gives …{appended[here]!r} where the template "
            f"renders …{rendered[here]!r}. Training would then see another history than the engine. Use a template "
            "that leaves history alone (for Qwen3-like templates: one without the branch that removes "
            "<think>…</think>), set as tokenizer.chat_template"
        )


def _array(ids: list[int]) -> IntArray:
    array = np.asarray(ids, np.int32)
    array.flags.writeable = False
    return array
