"""One request of the embedded engine, and its end.

Invariant: ``ids``, ``logprobs`` and the version record grow together, one entry per sampled token, and never shrink.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentkit.trainers.inference.base import Generation, Sampling
from agentkit.types import FinishReason, FloatArray, IntArray

_SLACK = 8
"""Tokens decoded beyond a stop string's bytes: leading-space conventions and split characters end within them."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A prompt, its sampling settings, and the tokens sampled so far."""

    session: str
    prompt: IntArray
    sampling: Sampling
    limit: int
    """Maximum tokens to sample: the smaller of the request's budget and the rest of the context."""
    numbers: FloatArray
    """Uniform numbers, one per token; empty for greedy decoding."""
    future: asyncio.Future[Generation]
    decode: Callable[[Sequence[int]], str] | None = None
    """Converts ids to text; set if there are stop strings."""
    stop_ids: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    _recorded: int = 0

    @property
    def tokens(self) -> IntArray:
        """Prompt and sampled ids, int32."""
        return np.concatenate([self.prompt, np.asarray(self.ids, np.int32)]) if self.ids else self.prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    def add(self, token: int, logprob: float) -> FinishReason | None:
        """Append a sampled token; return the finish reason, or None if the request continues."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or (self.decode is not None and self._stop_string_ends_here()):
            return "stop"
        return "length" if len(self.ids) >= self.limit else None

    def close_run(self, version: int) -> None:
        """Record that the tokens since the last call were made by ``version``."""
        count = len(self.ids) - self._recorded
        if count:
            self.runs.append((version, count))
            self._recorded = len(self.ids)

    def result(self, reason: FinishReason, version: int) -> Generation:
        """Return the generation so far; ``version`` made the tokens that have no recorded version yet."""
        self.close_run(version)
        return Generation(
            ids=np.asarray(self.ids, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=tuple(self.runs),
            finish_reason=reason,
        )

    def _stop_string_ends_here(self) -> bool:
        assert self.decode is not None
        window = max(len(text.encode()) for text in self.sampling.stop_strings) + _SLACK
        tail = self.decode(self.ids[-window:])
        return any(text in tail for text in self.sampling.stop_strings)
