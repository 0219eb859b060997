"""Sampling of one token for many requests at once, each with separate settings and random numbers.

Invariant: the token of a request depends only on its logits, settings and uniform number; the recorded log-probability
is that of the full vocabulary at the sampling temperature, before top-p and top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Sampling
from agentkit.types import FloatArray

_BELOW_ONE = np.float32(1 - 2**-22)
"""Keeps ``u * total`` under ``total`` in float32, so that the inverse of the distribution always finds a token."""


def uniforms(seed: int | Sequence[int], count: int) -> FloatArray:
    """Return ``count`` uniform numbers in ``[0, 1)``, float32; the k-th determines the request's k-th token."""
    return np.random.default_rng(seed).random(count, dtype=np.float32) * _BELOW_ONE


def check_sampling(sampling: Sampling) -> None:
    """Raise ``EngineError`` for a setting outside its range."""
    problems = [
        (sampling.max_tokens < 1, f"max_tokens={sampling.max_tokens} must be at least 1"),
        (not 0 <= sampling.temperature < float("inf"), f"temperature={sampling.temperature} must be at least 0"),
        (not 0 < sampling.top_p <= 1, f"top_p={sampling.top_p} must be above 0 and at most 1"),
        (sampling.top_k < 0, f"top_k={sampling.top_k} must be at least 0 (0 is off)"),
        ("" in sampling.stop_strings, "an empty string in stop_strings would stop everything"),
        (sampling.seed is not None and sampling.seed < 0, f"seed={sampling.seed} must be at least 0"),
    ]
    for broken, sentence in problems:
        if broken:
            raise EngineError(f"the request cannot be sampled: {sentence}")


class Sampler:
    """Settings of the rows of a batch as tensors; rebuilt only when the batch changes."""

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        def column(values: list[float] | list[int] | list[bool], needed: bool) -> torch.Tensor | None:
            return torch.tensor(values, device=device)[:, None] if needed else None

        temperatures = [s.temperature or 1.0 for s in settings]
        self._greedy = column([s.temperature == 0 for s in settings], any(s.temperature == 0 for s in settings))
        self._temperature = column(temperatures, any(t != 1 for t in temperatures))
        self._top_p = column([s.top_p for s in settings], any(s.top_p < 1 for s in settings))
        self._top_k = column([s.top_k for s in settings], any(s.top_k > 0 for s in settings))

    def __call__(self, logits: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample from float32 ``logits [n, vocabulary]`` and uniform ``numbers [n]``: ids int64 ``[n]``, log-probs
        ``[n]``."""
        if self._temperature is not None:
            logits = logits / self._temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        kept = logprobs.exp()
        if self._top_p is not None or self._top_k is not None:
            kept = truncate(kept, self._top_p, self._top_k)
        distribution = kept.cumsum(-1)
        ids = torch.searchsorted(distribution, numbers[:, None] * distribution[:, -1:], right=True)
        # Only non-finite logits leave the range; their log-probability reveals them.
        ids = ids.clamp_(max=logits.shape[-1] - 1)
        if self._greedy is not None:
            ids = torch.where(self._greedy, logprobs.argmax(-1, keepdim=True), ids)
        return ids[:, 0], logprobs.gather(1, ids)[:, 0]


def truncate(
    probabilities: torch.Tensor, top_p: torch.Tensor | None = None, top_k: torch.Tensor | None = None
) -> torch.Tensor:
    """Zero what top-k and then top-p (nucleus) drop; ``[n, vocabulary]``, settings ``[n, 1]``, not renormalised.

    The nucleus is the smallest set of most probable tokens whose share of the top-k mass reaches ``top_p``.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), 0.0)
    if top_p is not None:
        before = ordered.cumsum(-1) - ordered
        dropped = (before >= top_p * ordered.sum(-1, keepdim=True)) & (top_p < 1)
        dropped[:, 0] = False
        ordered = ordered.masked_fill(dropped, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered)
