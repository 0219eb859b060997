"""What a policy loss receives and returns, and the arithmetic of ratios that losses share.

Invariant: log-ratios are bounded before they are exponentiated, also those of whole turns and sequences, so that
nothing overflows. A sum over a turn or a sequence counts only action tokens: inputs are 0 at masked positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentkit.config import AlgorithmConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated, so that nothing overflows."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of a policy loss; every tensor has the shape ``[n]``, and every sequence is whole."""

    logprobs: Mapping[str, Tensor]
    """``policy`` (with gradient), and those of ``behaviour``, ``proximal``, ``reference`` that the loss needs."""
    advantages: Tensor
    policy_weight: Tensor
    entropy: Tensor
    """Entropy of the policy's distribution at each token; with gradient if there is an entropy bonus."""
    entropy_weight: Tensor
    mask: Tensor
    """bool: the token is an action."""
    turn_ids: Tensor
    """Integers: the token's turn within its sequence."""
    sequence_ids: Tensor
    """int64, from 0: the token's sequence in this micro-batch."""


class TokenLoss(NamedTuple):
    """Loss of each token and, for metrics, whether it was clipped or masked out (bool)."""

    loss: Tensor
    clipped: Tensor
    masked: Tensor


LossFunction = Callable[[TokenInputs, AlgorithmConfig], TokenLoss]


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamp to ``± LOG_RATIO_BOUND``."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def likelihood_ratio(logprob: Tensor, old: Tensor) -> Tensor:
    """``exp(logprob - old)`` for each token."""
    return bounded(logprob - old).exp()


def setting(value: float | None, default: float) -> float:
    """Return the configured value, or a loss's own default where it is null."""
    return default if value is None else value


def clip_range(config: AlgorithmConfig, low: float, high: float) -> tuple[float, float]:
    """Return ``(1 - clip_low, 1 + clip_high)``; ``low`` and ``high`` are the loss's own clips."""
    return 1 - setting(config.clip_low, low), 1 + setting(config.clip_high, high)


def sum_over(segments: Tensor, values: Tensor) -> Tensor:
    """Return, at each token, the sum of ``values`` over its segment.

    Args:
        segments: int64 from 0, ``[n]``, such as ``sequence_ids`` or ``turns(inputs)``.
        values: ``[n]``, 0 at masked positions; added in float64.
    """
    count = int(segments.max()) + 1 if len(segments) else 0
    sums = torch.zeros(count, dtype=torch.float64, device=values.device).index_add(0, segments, values.double())
    return sums[segments].to(values.dtype)


def mean_over(segments: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return, at each token, the mean of ``values`` over the action tokens of its segment."""
    return sum_over(segments, values) / sum_over(segments, mask.to(values.dtype)).clamp(min=1)


def turns(inputs: TokenInputs) -> Tensor:
    """Number the turns of all sequences; int64 ``[n]``."""
    turn_ids = inputs.turn_ids.long()
    most = int(turn_ids.max()) + 1 if len(turn_ids) else 1
    return torch.unique(inputs.sequence_ids * most + turn_ids, return_inverse=True)[1]
