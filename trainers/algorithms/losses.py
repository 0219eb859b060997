"""Policy losses, KL terms, entropy and the critic's loss: pure functions over tensors of one shape ``[n]``.

Invariant: nothing at a masked position reaches the loss, its gradient or a metric, not even NaN. A policy loss
corrects for off-policy data against the *behaviour* log-probabilities that the engine recorded; a log-probability
recomputed by the learner (``proximal``) never stands in for them.
Formulas and sources: ``docs/algorithms.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms.aggregate import aggregate

Needed = Literal["policy", "behaviour", "proximal", "reference"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before they are exponentiated, so that nothing overflows."""


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of a policy loss; every tensor has the shape ``[n]``."""

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
    sequence_ids: Tensor
    """int64, from 0: the token's sequence in this micro-batch."""


class TokenLoss(NamedTuple):
    """Loss of each token and, for metrics, whether it was clipped or masked out (bool)."""

    loss: Tensor
    clipped: Tensor
    masked: Tensor


class PolicyLoss(NamedTuple):
    """A loss function with the log-probabilities that it needs."""

    needs: frozenset[Needed]
    function: Callable[[TokenInputs, AlgorithmConfig], TokenLoss]


def needed_logprobs(config: AlgorithmConfig) -> frozenset[str]:
    """Log-probabilities that training under ``config`` needs, those of a KL term included."""
    needs = set(POLICY_LOSSES[config.loss].needs) | {"policy", "behaviour"}
    if config.kl != "none":
        needs.add("reference")
    return frozenset(needs)


def policy_objective(inputs: TokenInputs, config: AlgorithmConfig, divisor: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss plus KL term minus entropy bonus, aggregated with the step's global ``divisor``.

    Returns the scalar loss (to be summed over micro-batches and ranks) and detached sums over the action tokens, from
    which ``metrics`` makes means.
    """
    inputs = sanitise(inputs)
    token = POLICY_LOSSES[config.loss].function(inputs, config)
    total = inputs.policy_weight * token.loss
    sums = {
        "clip_fraction": token.clipped.float(),
        "mask_fraction": (token.masked | (inputs.policy_weight == 0)).float(),
    }

    if config.kl != "none":
        log_ratio = _bounded(inputs.logprobs["policy"] - inputs.logprobs["reference"])
        sums["kl_reference"] = kl_estimate(config.kl, log_ratio)
        if config.kl_in == "loss" and config.kl_coef > 0:
            total = total + config.kl_coef * kl_loss(config.kl, inputs, config.is_cap)
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * inputs.entropy_weight * inputs.entropy

    log_weight = _bounded(inputs.logprobs["policy"] - inputs.logprobs["behaviour"]).detach()
    weight = log_weight.exp()
    sums |= {
        "entropy": inputs.entropy,
        "kl_behaviour": weight - 1 - log_weight,
        "weight": weight,
        "weight_squared": weight**2,
    }
    mask = inputs.mask
    summed = {
        name: torch.where(mask, value.detach(), torch.zeros_like(value)).double().sum() for name, value in sums.items()
    }
    return aggregate(config.aggregation, total, mask, inputs.sequence_ids, divisor), summed


def sanitise(inputs: TokenInputs) -> TokenInputs:
    """Replace values at masked positions by 0, so that NaN cannot reach a gradient."""

    def clean(tensor: Tensor) -> Tensor:
        return torch.where(inputs.mask, tensor, torch.zeros_like(tensor))

    return TokenInputs(
        logprobs={name: clean(value) for name, value in inputs.logprobs.items()},
        advantages=clean(inputs.advantages),
        policy_weight=clean(inputs.policy_weight),
        entropy=clean(inputs.entropy),
        entropy_weight=clean(inputs.entropy_weight),
        mask=inputs.mask,
        turn_ids=clean(inputs.turn_ids),
        sequence_ids=inputs.sequence_ids,
    )


def ppo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """Clipped surrogate with ``r = policy / behaviour``, optionally with the dual clip."""
    return _clipped_surrogate(inputs, inputs.logprobs["behaviour"], config)


def decoupled_ppo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``w * clipped surrogate`` with ``r = policy / proximal``, ``w = proximal / behaviour``; tokens with
    ``w > is_cap`` are masked out."""
    weight = _ratio(inputs.logprobs["proximal"], inputs.logprobs["behaviour"]).detach()
    surrogate = _clipped_surrogate(inputs, inputs.logprobs["proximal"], config)
    dropped = weight > config.is_cap
    loss = torch.where(dropped, torch.zeros_like(weight), weight) * surrogate.loss
    return TokenLoss(loss, surrogate.clipped, dropped)


def tis(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``min(w, is_cap) * clipped surrogate`` with ``r = policy / proximal``, ``w = proximal / behaviour``."""
    weight = _ratio(inputs.logprobs["proximal"], inputs.logprobs["behaviour"]).detach()
    surrogate = _clipped_surrogate(inputs, inputs.logprobs["proximal"], config)
    return TokenLoss(weight.clamp(max=config.is_cap) * surrogate.loss, surrogate.clipped, surrogate.masked)


def cispo(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log policy`` with ``r = policy / behaviour``: the weight is
    clipped, no token's gradient is lost."""
    policy = inputs.logprobs["policy"]
    ratio = _ratio(policy, inputs.logprobs["behaviour"]).detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(-weight * inputs.advantages * policy, weight != ratio, torch.zeros_like(inputs.mask))


def pg(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A * log policy``: no correction, for on-policy data."""
    never = torch.zeros_like(inputs.mask)
    return TokenLoss(-inputs.advantages * inputs.logprobs["policy"], never, never)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(frozenset({"policy", "behaviour"}), ppo),
    "decoupled_ppo": PolicyLoss(frozenset({"policy", "behaviour", "proximal"}), decoupled_ppo),
    "tis": PolicyLoss(frozenset({"policy", "behaviour", "proximal"}), tis),
    "cispo": PolicyLoss(frozenset({"policy", "behaviour"}), cispo),
    "pg": PolicyLoss(frozenset({"policy"}), pg),
}


def kl_estimate(kind: Literal["none", "k1", "k2", "k3"], log_ratio: Tensor) -> Tensor:
    """Per-sample estimate of ``KL(p || q)`` from ``log_ratio = log p - log q`` of samples of ``p`` (Schulman 2020)."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return torch.expm1(-log_ratio) + log_ratio


def kl_loss(kind: Literal["none", "k1", "k2", "k3"], inputs: TokenInputs, cap: float) -> Tensor:
    """KL term per token, whose expected gradient is that of ``KL(policy || reference)`` also off-policy.

    The samples are weighted by ``w = policy / behaviour``, truncated at ``cap``. k1 and k3 keep the gradient of the
    weight (without it k1's is zero on average and k3's is biased); k2's own gradient is the right one.
    """
    policy = inputs.logprobs["policy"]
    weight = _ratio(policy, inputs.logprobs["behaviour"]).detach().clamp(max=cap)
    estimate = kl_estimate(kind, _bounded(policy - inputs.logprobs["reference"]))
    if kind == "k2":
        return weight * estimate
    return weight * torch.exp(policy - policy.detach()) * estimate


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> Tensor:
    """``0.5 * max((V - R)^2, (clip(V, V_old ± clip) - R)^2)`` per token, 0 where masked (PPO's value loss)."""
    zero = torch.zeros_like(values)
    values, old_values, returns = (torch.where(mask, x, zero) for x in (values, old_values, returns))
    loss = (values - returns) ** 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns) ** 2)
    return 0.5 * loss


def _clipped_surrogate(inputs: TokenInputs, old: Tensor, config: AlgorithmConfig) -> TokenLoss:
    advantages = inputs.advantages
    ratio = _ratio(inputs.logprobs["policy"], old)
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss, was_clipped = torch.maximum(free, clipped), clipped > free
    if config.dual_clip is not None:
        bound = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, was_clipped = torch.where(beyond, bound, loss), was_clipped | beyond
    return TokenLoss(loss, was_clipped, torch.zeros_like(inputs.mask))


def _ratio(logprob: Tensor, old: Tensor) -> Tensor:
    return _bounded(logprob - old).exp()


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
