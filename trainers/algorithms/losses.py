"""The policy objective: the registry of policy losses, KL terms, entropy and the critic's loss, over tensors ``[n]``.

Invariant: nothing at a masked position reaches the loss, its gradient or a metric, not even NaN. A policy loss
corrects for off-policy data against the *behaviour* log-probabilities that the engine recorded; a log-probability
recomputed by the learner (``proximal``) never stands in for them; only ``gspo`` is defined without them. No weight or
mask of a loss changes a denominator.
Formulas and sources: ``docs/algorithms.md``. The losses: ``surrogate`` and ``importance``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentkit.config import AlgorithmConfig
from agentkit.plugins import LOSS, Aggregation
from agentkit.trainers.algorithms import importance, plugin, surrogate
from agentkit.trainers.algorithms.aggregate import aggregate
from agentkit.trainers.algorithms.interface import (
    LossFunction,
    TokenInputs,
    TokenLoss,
    bounded,
    likelihood_ratio,
    setting,
)

POLICY_LOSSES: dict[str, LossFunction] = {
    "pg": surrogate.pg,
    "ppo": surrogate.ppo,
    "cispo": surrogate.cispo,
    "gspo": surrogate.gspo,
    "sapo": surrogate.sapo,
    "decoupled_ppo": importance.decoupled_ppo,
    "tis": importance.tis,
    "mis": importance.mis,
    "seq_tis": importance.seq_tis,
    "seq_mis": importance.seq_mis,
    "dis": importance.dis,
    "topr": importance.topr,
    "chunk_topr": importance.chunk_topr,
    "raft": surrogate.pg,
    "raft_pp": surrogate.ppo,
    "flash_reinforce": importance.flash_reinforce,
    "kimi": surrogate.kimi,
}
"""Built-in losses; ``agentkit.plugins.LOSS`` holds what each declares."""


def policy_loss(config: AlgorithmConfig) -> LossFunction:
    """Return the configured loss: a built-in one or a plug-in."""
    return POLICY_LOSSES.get(config.loss, _plugin_loss)


def _plugin_loss(inputs: TokenInputs, config: AlgorithmConfig) -> TokenLoss:
    return TokenLoss(*plugin.token_loss(inputs, config))


def aggregation(config: AlgorithmConfig) -> Aggregation:
    """Return the configured aggregation, or the one that the loss is defined with."""
    return config.aggregation or LOSS.traits(config.loss).aggregation or "token_mean"


def needed_logprobs(config: AlgorithmConfig) -> frozenset[str]:
    """Log-probabilities that training under ``config`` needs, those of a KL term included."""
    needs = set(LOSS.traits(config.loss).needs) | {"policy", "behaviour"}
    if config.kl != "none":
        needs.add("reference")
    return frozenset(needs)


def needs_whole_sequences(config: AlgorithmConfig) -> bool:
    """Return whether the loss of a token depends on other tokens of its sequence outside of its turn."""
    return LOSS.traits(config.loss).whole or aggregation(config) == "sequence_mean"


def policy_objective(inputs: TokenInputs, config: AlgorithmConfig, divisor: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss plus KL term minus entropy bonus, aggregated with the step's global ``divisor``.

    Returns the scalar loss (to be summed over micro-batches and ranks) and detached sums over the action tokens, from
    which ``metrics`` makes means.
    """
    inputs = sanitise(inputs)
    token = policy_loss(config)(inputs, config)
    total = inputs.policy_weight * token.loss
    sums = {
        "clip_fraction": token.clipped.float(),
        "mask_fraction": (token.masked | (inputs.policy_weight == 0)).float(),
    }

    if config.kl != "none":
        log_ratio = bounded(inputs.logprobs["policy"] - inputs.logprobs["reference"])
        sums["kl_reference"] = kl_estimate(config.kl, log_ratio)
        if config.kl_in == "loss" and config.kl_coef > 0:
            total = total + config.kl_coef * kl_loss(config.kl, inputs, setting(config.is_cap, 2.0))
    if config.entropy_coef > 0:
        total = total - config.entropy_coef * inputs.entropy_weight * inputs.entropy

    log_weight = bounded(inputs.logprobs["policy"] - inputs.logprobs["behaviour"]).detach()
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
    return aggregate(aggregation(config), total, mask, inputs.sequence_ids, divisor), summed


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
    weight = likelihood_ratio(policy, inputs.logprobs["behaviour"]).detach().clamp(max=cap)
    estimate = kl_estimate(kind, bounded(policy - inputs.logprobs["reference"]))
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
