"""The interface of inference engines: token ids in, token ids with log-probabilities and policy versions out.

Invariant: a ``Generation`` is exactly what the engine sampled. Re-scoring ``prompt_ids + ids`` under the weights of the
recorded versions gives ``logprobs`` to float tolerance, over the full vocabulary at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from agentkit.trainers.weights.base import Weights
from agentkit.types import FinishReason, FloatArray, IntArray, VersionRuns

PauseMode = Literal["abort", "keep"]
"""Effect of a pause on requests in flight. ``abort``: they return at once with ``finish_reason="abort"`` (the rollout
loop generates the turn again). ``keep``: they stay, and continue after ``resume`` with their cache recomputed under the
weights loaded then."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of one request. The defaults are those of training: the full distribution at temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy decoding (log-probabilities are then those of temperature 1)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    stop_ids: tuple[int, ...] = ()
    """Generation ends after one of these ids is sampled; the id is part of the result."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends after the token that completes one of these strings; that token is part of the result."""
    seed: int | None = None
    """Seed of the request: the same seed, prompt and weights give the same tokens."""

    def __reduce__(self) -> tuple[Any, ...]:  # pickles in half the time; each request between processes needs it
        limits = (self.max_tokens, self.temperature, self.top_p, self.top_k)
        return Sampling, (*limits, self.stop_ids, self.stop_strings, self.seed)


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request: ``ids`` int32 ``[n]``, ``logprobs`` float32 ``[n]``, ``versions`` run-length."""

    ids: IntArray
    logprobs: FloatArray
    versions: VersionRuns
    finish_reason: FinishReason

    def __reduce__(self) -> tuple[Any, ...]:  # as that of ``Sampling``
        return Generation, (self.ids, self.logprobs, self.versions, self.finish_reason)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started; differences of two snapshots give rates."""

    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int
    """Prompt tokens that were found in a prefix cache of the current weights."""
    busy_s: float
    """Seconds in which at least one request was being computed."""
    running: int
    waiting: int
    version: int = 0
    """Version of the weights; set by a router for each of its engines."""
    restarts: int = 0
    """Engines that were lost."""
    request_s: float = 0.0
    """Sum of the seconds that requests were being computed: divided by the tokens, the time of a token."""
    engines: tuple[EngineStats, ...] = ()
    """Of a router: the counters of each engine, which a replacement continues."""


class TokenGenerator(Protocol):
    """The part of an engine that episodes need."""

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        """Sample a continuation of the whole ``prompt_ids`` (history included).

        ``session`` names the episode, so an engine can reuse the prefix of its earlier turns. Cancelling the call
        frees its slot. Raises ``EngineError`` when the request cannot be served (for example, the prompt exceeds the
        context).
        """
        ...

    async def abort(self, session: str) -> None:
        """End a session's request, if any, with ``finish_reason="abort"``, and forget its prefix cache. Idempotent."""
        ...


class InferenceEngine(TokenGenerator, Protocol):
    """An inference engine. All methods are coroutines."""

    async def start(self) -> None:
        """Load the model and start serving. Raises ``EngineError`` with the cause and the remedy."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. After this returns, nothing is computed and no request is admitted until ``resume``."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, weights: Weights) -> int:
        """Load ``weights`` (names as in the model's state dict) and serve them as policy ``weights.version``.

        Call it while paused. Returns the version that is now served, after all prefix caches of older weights are
        cleared. Raises ``EngineError``; weights that do not fit the model, or are no longer available, change nothing.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop everything the engine started. Idempotent."""
        ...


class ManagedEngine(InferenceEngine, Protocol):
    """An engine as a training run manages it."""

    async def sleep(self) -> None:
        """Free the engine's memory on the GPU until the next ``update_weights``. Call it while paused."""
        ...

    async def checksum(self) -> str:
        """Return a digest of the weights as they are served; engines of one kind with equal weights have equal ones."""
        ...
