"""Policy losses that correct for data of an older policy with importance weights, truncated or masked.

Invariant: weights have no gradient, and a masked token keeps its place in the denominators: masking makes the step
smaller and leaves the other tokens unchanged.

The first five multiply PPO's terms, with the ratio ``policy / proximal``, by a weight made of ``proximal / behaviour``.
The others weight ``log policy`` by a ratio of the policy itself. ``A`` is the advantage; products, means and sums run
over the action tokens of a sequence, turns joined.
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
    setting,
    sum_over,
    turns,
)
from agentkit.trainers.algorithms.surrogate import clipped_surrogate


def decoupled_ppo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``w * PPO`` with ``w = proximal / behaviour`` per token; tokens with ``w > is_cap`` (2) are masked out
    (arXiv:2110.00641; the mask: AReaL, arXiv:2505.24298)."""
    return _weighted_ppo(inputs, config, _token_weight(inputs), floor=0.0, cap=2.0)


def mis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """Masked importance sampling per token (IcePop, Ring-1T, arXiv:2510.18855): ``w * PPO`` with ``w = proximal /
    behaviour`` where ``is_floor (0.5) <= w <= is_cap (5)``, otherwise 0."""
    return _weighted_ppo(inputs, config, _token_weight(inputs), floor=setting(config.is_floor, 0.5), cap=5.0)


def seq_mis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """Masked importance sampling per sequence (Liu, Li et al. 2025): ``w * PPO`` with ``w = prod(proximal /
    behaviour)`` where ``is_floor (0) <= w <= is_cap (2)``, otherwise 0."""
    return _weighted_ppo(inputs, config, _sequence_weight(inputs), floor=setting(config.is_floor, 0.0), cap=2.0)


def tis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """Truncated importance sampling per token (Yao et al. 2025): ``min(w, is_cap) * PPO`` with ``w = proximal /
    behaviour``."""
    return _truncated_ppo(inputs, config, _token_weight(inputs))


def seq_tis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """Truncated importance sampling per sequence (Liu, Li et al. 2025): ``min(w, is_cap) * PPO`` with ``w =
    prod(proximal / behaviour)``."""
    return _truncated_ppo(inputs, config, _sequence_weight(inputs))


def dis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-sg(r [1 - clip_low < r < 1 + clip_high]) A log policy`` with ``r = policy / behaviour`` (SAO,
    arXiv:2607.07508); its clips are 0.3 and 5."""
    policy = inputs.logprobs["policy"]
    ratio = likelihood_ratio(policy, inputs.logprobs["behaviour"]).detach()
    low, high = clip_range(config, 0.3, 5.0)
    return _weighted_gradient(inputs, ratio, masked=(ratio <= low) | (ratio >= high))


def topr(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-sg(alpha) A log policy`` (tapered off-policy REINFORCE, arXiv:2503.14286).

    ``alpha = 1`` in sequences with ``sum A >= 0``; in others ``clip(prod(policy / behaviour), 0, 1)``, or with
    ``topr_ratio`` the geometric mean or the token's ratio in place of the product.
    """
    difference = (inputs.logprobs["policy"] - inputs.logprobs["behaviour"]).detach()
    if config.topr_ratio == "product":
        difference = sum_over(inputs.sequence_ids, difference)
    elif config.topr_ratio == "geometric":
        difference = mean_over(inputs.sequence_ids, difference, inputs.mask)
    return _tapered(inputs, inputs.sequence_ids, bounded(difference).exp(), torch.zeros_like(inputs.mask))


def chunk_topr(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-sg(m alpha) A log policy`` over chunks, which are turns (IPA, arXiv:2512.24873).

    The chunk's ratio ``rho`` is the geometric mean of ``policy / proximal`` over its tokens: ``alpha = 1`` in chunks
    with ``sum A >= 0``, otherwise ``clip(rho, 0, 1)``. A chunk is masked (``m = 0``) if the geometric mean of
    ``proximal / behaviour`` exceeds ``is_cap`` (2; the paper gives no value).
    """
    policy, proximal = inputs.logprobs["policy"].detach(), inputs.logprobs["proximal"]
    chunks = turns(inputs)
    ratio = bounded(mean_over(chunks, policy - proximal, inputs.mask)).exp()
    mismatch = bounded(mean_over(chunks, proximal - inputs.logprobs["behaviour"], inputs.mask)).exp()
    return _tapered(inputs, chunks, ratio, mismatch > setting(config.is_cap, 2.0))


def flash_reinforce(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-m sg(policy / behaviour) A log policy`` (FlashREINFORCE, NVIDIA 2026).

    A sequence is masked (``m = 0``) if the mean over its tokens of the KL divergence between ``(p, 1 - p)`` and ``(q, 1
    - q)`` exceeds ``kl_gate``; ``p`` and ``q`` are the behaviour's and the policy's probabilities of the token.
    """
    policy, behaviour = inputs.logprobs["policy"].detach(), inputs.logprobs["behaviour"]
    divergence = mean_over(inputs.sequence_ids, binary_kl(behaviour, policy), inputs.mask)
    return _weighted_gradient(inputs, likelihood_ratio(policy, behaviour), masked=divergence > config.kl_gate)


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """``KL((P, 1 - P) || (Q, 1 - Q))`` of log-probabilities ``p = log P`` and ``q = log Q``; 0 where they are equal."""

    def log_rest(x: Tensor) -> Tensor:
        return (-torch.expm1(x)).clamp(min=torch.finfo(x.dtype).tiny).log()

    return p.exp() * (p - q) - torch.expm1(p) * (log_rest(p) - log_rest(q))


def _token_weight(inputs: TokenInputs) -> Tensor:
    return likelihood_ratio(inputs.logprobs["proximal"], inputs.logprobs["behaviour"])


def _sequence_weight(inputs: TokenInputs) -> Tensor:
    difference = inputs.logprobs["proximal"] - inputs.logprobs["behaviour"]
    return bounded(sum_over(inputs.sequence_ids, difference)).exp()


def _proximal_ppo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    ratio = likelihood_ratio(inputs.logprobs["policy"], inputs.logprobs["proximal"])
    return clipped_surrogate(inputs.advantages, ratio, clip_range(config, 0.2, 0.2), config.dual_clip)


def _truncated_ppo(inputs: TokenInputs, config: AlgorithmConfig, weight: Tensor) -> TokenLoss:
    surrogate = _proximal_ppo(inputs, config)
    return surrogate._replace(loss=weight.clamp(max=setting(config.is_cap, 2.0)) * surrogate.loss)


def _weighted_ppo(
    inputs: TokenInputs, config: AlgorithmConfig, weight: Tensor, *, floor: float, cap: float
) -> TokenLoss:
    surrogate = _proximal_ppo(inputs, config)
    masked = (weight < floor) | (weight > setting(config.is_cap, cap))
    return surrogate._replace(loss=weight.masked_fill(masked, 0) * surrogate.loss, masked=masked)


def _weighted_gradient(inputs: TokenInputs, weight: Tensor, *, masked: Tensor) -> TokenLoss:
    loss = -weight.masked_fill(masked, 0) * inputs.advantages * inputs.logprobs["policy"]
    return TokenLoss(loss, torch.zeros_like(masked), masked)


def _tapered(inputs: TokenInputs, segments: Tensor, ratio: Tensor, masked: Tensor) -> TokenLoss:
    """Weight 1 in segments with ``sum A >= 0``, ``min(ratio, 1)`` in others; ``clipped``: the ratio was above 1."""
    negative = sum_over(segments, inputs.advantages) < 0
    weight = torch.where(negative, ratio.clamp(max=1), torch.ones_like(ratio))
    return _weighted_gradient(inputs, weight, masked=masked)._replace(clipped=negative & (ratio > 1))
