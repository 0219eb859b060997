"""Policy losses that bound how far one batch moves the policy: clips, gates and penalties around the ratio.

Each function maps the inputs to a loss per token. ``r = policy / behaviour`` unless a docstring names another
denominator: the policy that sampled the data is the old policy of the papers. ``A`` is the advantage, ``sg`` stops the
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms.interface import (
    TokenInputs,
    TokenLoss,
    bounded,
    clip_range,
    likelihood_ratio,
    mean_over,
)

SAPO_TEMPERATURES = (1.0, 1.05)
"""SAPO's tau for positive advantages, and for others."""
KIMI_PENALTY = 0.1
"""Kimi's tau, as in ROLL."""


def pg(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A log policy`` (Williams 1992): no correction, for on-policy data. With ``A = max(R, 0)`` it is RAFT
    (Dong et al., arXiv:2304.06767)."""
    return unclipped(-inputs.advantages * inputs.logprobs["policy"])


def ppo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(r A, clip(r, 0.8, 1.2) A)``, optionally with the dual clip (arXiv:1707.06347, eq. 7). With ``A = max(R,
    0)`` it is RAFT++ (arXiv:2504.11343)."""
    ratio = likelihood_ratio(inputs.logprobs["policy"], inputs.logprobs["behaviour"])
    return clipped_surrogate(inputs.advantages, ratio, clip_range(config, 0.2, 0.2), config.dual_clip)


def cispo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-sg(clip(r, 0.8, 1.2)) A log policy`` (arXiv:2506.13585): the weight is clipped, no token's gradient is
    lost."""
    policy = inputs.logprobs["policy"]
    ratio = likelihood_ratio(policy, inputs.logprobs["behaviour"]).detach()
    weight = ratio.clamp(*clip_range(config, 0.2, 0.2))
    return TokenLoss(-weight * inputs.advantages * policy, weight != ratio, torch.zeros_like(inputs.mask))


def gspo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(s_t A, clip(s_t, 1 - 3e-4, 1 + 4e-4) A)`` with one ratio per sequence (GSPO-token, arXiv:2507.18071).

    ``s = exp(mean_t(log policy - log proximal))`` and ``s_t = sg(s) policy / sg(policy)``. Proximal, because the
    engine's log-probabilities differ from the learner's by more than this window.
    """
    policy = inputs.logprobs["policy"]
    difference = (policy - inputs.logprobs["proximal"]).detach()
    sequence = bounded(mean_over(inputs.sequence_ids, difference, inputs.mask)).exp()
    ratio = sequence * torch.exp(policy - policy.detach())
    return clipped_surrogate(inputs.advantages, ratio, clip_range(config, 3e-4, 4e-4), None)


def sapo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``: a soft gate instead of a clip (arXiv:2511.20347); tau is 1 for ``A > 0``,
    otherwise 1.05."""
    ratio = likelihood_ratio(inputs.logprobs["policy"], inputs.logprobs["behaviour"])
    positive, others = SAPO_TEMPERATURES
    tau = torch.full_like(ratio, others).masked_fill(inputs.advantages > 0, positive)
    return unclipped(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * inputs.advantages)


def kimi(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A log policy + (tau / 2) (log r)^2`` with ``tau = 0.1`` (arXiv:2501.12599, per token as in ROLL)."""
    policy = inputs.logprobs["policy"]
    distance = bounded(policy - inputs.logprobs["behaviour"]) ** 2
    return unclipped(-inputs.advantages * policy + KIMI_PENALTY / 2 * distance)


def clipped_surrogate(
    advantages: Tensor, ratio: Tensor, clips: tuple[float, float], dual_clip: float | None
) -> TokenLoss:
    """``-min(r A, clip(r, *clips) A)``; for ``A < 0`` at most ``-dual_clip A`` (arXiv:1912.09729)."""
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clips)
    loss, was_clipped = torch.maximum(free, clipped), clipped > free
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, was_clipped = torch.where(beyond, bound, loss), was_clipped | beyond
    return TokenLoss(loss, was_clipped, torch.zeros_like(was_clipped))


def unclipped(loss: Tensor) -> TokenLoss:
    """A loss that neither clips nor masks tokens."""
    never = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, never, never)
