"""The requests of a session, joined into sequences of tokens.

Invariant: each sequence is exactly what the engine saw and sampled, in this order; each sampled token is masked as the
policy's in exactly one sequence. A request whose messages extend an earlier request and its answer continues that
sequence; any other request starts a branch. No clocks, no engine here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentkit.trainers.endpoint.dialogue import Dialogue
from agentkit.trainers.inference.base import Generation
from agentkit.types import FloatArray, IntArray, Message, Turn


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine is given for a request."""

    dialogue: Dialogue
    messages: tuple[Message, ...]
    ids: IntArray
    """All ids, int32 ``[p]``."""
    parent: int | None
    """Index of the request that this one continues; None: it starts a branch."""
    shared: int
    """Ids at the start that the parent's prompt and answer have; 0 for a branch."""

    @property
    def added(self) -> IntArray:
        """Ids after the parent's answer."""
        return self.ids[self.shared :]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer."""

    prompt: Prompt
    generation: Generation
    answer: Message
    generate_s: float


class RecordedSequence(NamedTuple):
    """One training sequence of ``n`` tokens, which ends with the policy's last token."""

    ids: IntArray
    """int32 ``[n]``."""
    mask: NDArray[np.bool_]
    """bool ``[n]``: True where the policy chose the token, and no earlier sequence has it."""
    logprobs: FloatArray
    """float32 ``[n]``: of the behaviour policy; 0 where ``mask`` is False."""
    versions: IntArray
    """int32 ``[n]``: the policy version that sampled the token; -1 where ``mask`` is False."""


class SessionRecorder:
    """The exchanges of one session, in the order in which they ended."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def prompt(self, dialogue: Dialogue, messages: Sequence[Message]) -> Prompt:
        """Return the prompt of a request: the continuation of an earlier exchange, or a branch.

        Args:
            dialogue: the chat format with the tools of the request.
            messages: the messages of the request.

        Raises:
            RendererError: the chat template refuses the conversation.
        """
        messages = tuple(messages)
        parent = self._extended(dialogue, messages)
        if parent is not None:
            earlier = self.exchanges[parent]
            ids = earlier.generation.ids
            before = earlier.prompt.messages
            added = dialogue.continuation(before, earlier.answer, ids, messages[len(before) + 1 :])
            if added is not None:
                whole = np.concatenate([earlier.prompt.ids, ids, added])
                return Prompt(dialogue, messages, whole, parent, len(whole) - len(added))
        return Prompt(dialogue, messages, dialogue.prompt(messages), None, 0)

    def add(self, prompt: Prompt, generation: Generation, answer: Message, generate_s: float = 0.0) -> None:
        """Record the answer to a prompt.

        Args:
            prompt: as ``prompt`` returned it.
            generation: what the engine sampled.
            answer: the answer as the agent gets it.
            generate_s: seconds until the engine had answered.
        """
        self.exchanges.append(Exchange(prompt, generation, answer, generate_s))

    def _extended(self, dialogue: Dialogue, messages: tuple[Message, ...]) -> int | None:
        """Return the longest exchange that ``messages`` extend, the latest of equal ones."""
        longest, found = 0, None
        for index, exchange in enumerate(self.exchanges):
            length = len(exchange.prompt.messages) + 1
            if (
                longest <= length < len(messages)
                and exchange.prompt.dialogue.tools == dialogue.tools
                and messages[length - 1] == exchange.answer
                and messages[: length - 1] == exchange.prompt.messages
            ):
                longest, found = length, index
        return found


def sequences(exchanges: Sequence[Exchange]) -> list[RecordedSequence]:
    """Return the training sequences of a session: one for each exchange that no other continues.

    Args:
        exchanges: of ``SessionRecorder``.
    """
    continued = {exchange.prompt.parent for exchange in exchanges}
    owners: dict[int, int] = {}
    found = []
    for last in (index for index in range(len(exchanges)) if index not in continued):
        path = _path(exchanges, last)
        for index in path:
            owners.setdefault(index, last)
        found.append(_joined([(exchanges[index], owners[index] == last) for index in path]))
    return found


def turns(exchanges: Sequence[Exchange]) -> tuple[list[Turn], bool]:
    """Return the turns of an episode, and whether each is a sequence of its own (``Trajectory.rerendered``).

    A session without branches is one sequence; otherwise each turn has its whole prompt.

    Args:
        exchanges: of ``SessionRecorder``.
    """
    linear = all(exchange.prompt.parent == (index - 1 if index else None) for index, exchange in enumerate(exchanges))
    return [_turn(exchanges, exchange, linear) for exchange in exchanges], not linear


def _turn(exchanges: Sequence[Exchange], exchange: Exchange, linear: bool) -> Turn:
    prompt, generation = exchange.prompt, exchange.generation
    known = 0 if prompt.parent is None else len(exchanges[prompt.parent].prompt.messages) + 1
    return Turn(
        prompt_ids=prompt.added if linear else prompt.ids,
        action_ids=generation.ids,
        action_logprobs=generation.logprobs,
        versions=generation.versions,
        finish_reason=generation.finish_reason,
        observation="\n\n".join(message.content for message in prompt.messages[known:]),
        response=prompt.dialogue.spell(generation.ids),
        generate_s=exchange.generate_s,
    )


def _path(exchanges: Sequence[Exchange], last: int) -> list[int]:
    path, index = [], last
    while index is not None:
        path.append(index)
        index = exchanges[index].prompt.parent
    return path[::-1]


def _joined(path: Sequence[tuple[Exchange, bool]]) -> RecordedSequence:
    """Join exchanges; the flag says whether this sequence trains the answer."""
    parts: list[tuple[IntArray, NDArray[np.bool_], FloatArray, IntArray]] = []
    for exchange, owned in path:
        for ids, sampled in ((exchange.prompt.added, False), (exchange.generation.ids, owned)):
            logprobs = exchange.generation.logprobs if sampled else np.zeros(len(ids), np.float32)
            versions = np.full(len(ids), -1, np.int32)
            if sampled:
                numbers, counts = zip(*exchange.generation.versions, strict=True)
                versions = np.repeat(np.array(numbers, np.int32), counts)
            parts.append((ids, np.full(len(ids), sampled), logprobs, versions))
    return RecordedSequence(*(np.concatenate(column) for column in zip(*parts, strict=True)))
