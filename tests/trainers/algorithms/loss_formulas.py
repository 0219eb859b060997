"""Every policy loss, written again token by token in plain Python.

A formula maps a whole sequence to one ``Term`` per token: the loss, its derivative with respect to the token's
log-probability under the policy (weights have no gradient), and whether the token was clipped or masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from agentkit.config import AlgorithmConfig


class Token(NamedTuple):
    policy: float
    behaviour: float
    proximal: float
    advantage: float
    turn: int


class Term(NamedTuple):
    loss: float
    slope: float
    clipped: bool = False
    masked: bool = False


Sequence = list[Token]
Formula = Callable[[Sequence, AlgorithmConfig], list[Term]]


def clips(config, low, high):
    low = low if config.clip_low is None else config.clip_low
    high = high if config.clip_high is None else config.clip_high
    return 1 - low, 1 + high


def surrogate(ratio, advantage, bounds, dual_clip=None):
    """Clipped surrogate (d ratio / d log policy = ratio)."""
    low, high = bounds
    objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
    clipped = objective < ratio * advantage
    if dual_clip is not None and advantage < 0 and objective < dual_clip * advantage:
        return Term(-dual_clip * advantage, 0.0, clipped=True)
    return Term(-objective, 0.0 if clipped else -ratio * advantage, clipped)


def weighted(weight, token, *, clipped=False, masked=False):
    """``-sg(weight) A log policy``, 0 where masked."""
    weight = 0.0 if masked else weight
    return Term(-weight * token.advantage * token.policy, -weight * token.advantage, clipped, masked)


def pg(sequence, config):
    return [weighted(1.0, token) for token in sequence]


def ppo(sequence, config):
    bounds = clips(config, 0.2, 0.2)
    return [surrogate(math.exp(t.policy - t.behaviour), t.advantage, bounds, config.dual_clip) for t in sequence]


def cispo(sequence, config):
    low, high = clips(config, 0.2, 0.2)
    ratios = [math.exp(t.policy - t.behaviour) for t in sequence]
    return [
        weighted(min(max(r, low), high), t, clipped=not low <= r <= high) for r, t in zip(ratios, sequence, strict=True)
    ]


def gspo(sequence, config):
    ratio = math.exp(sum(t.policy - t.proximal for t in sequence) / len(sequence))
    return [surrogate(ratio, t.advantage, clips(config, 3e-4, 4e-4)) for t in sequence]


def sapo(sequence, config):
    terms = []
    for t in sequence:
        tau, ratio = 1.0 if t.advantage > 0 else 1.05, math.exp(t.policy - t.behaviour)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        terms.append(Term(-4 / tau * gate * t.advantage, -4 * gate * (1 - gate) * ratio * t.advantage))
    return terms


def kimi(sequence, config):
    def term(t):
        distance = t.policy - t.behaviour
        return Term(-t.advantage * t.policy + 0.05 * distance**2, -t.advantage + 0.1 * distance)

    return [term(t) for t in sequence]


def corrected(of_sequence: bool, floor: float, cap: float, *, truncate: bool) -> Formula:
    """PPO against the proximal policy, times proximal / behaviour: truncated, or 0 outside of a range."""

    def formula(sequence, config):
        lowest = floor if config.is_floor is None else config.is_floor
        highest = cap if config.is_cap is None else config.is_cap
        product = math.prod(math.exp(t.proximal - t.behaviour) for t in sequence)
        terms = []
        for t in sequence:
            weight = product if of_sequence else math.exp(t.proximal - t.behaviour)
            masked = not truncate and not lowest <= weight <= highest
            weight = 0.0 if masked else min(weight, highest)
            bounds = clips(config, 0.2, 0.2)
            term = surrogate(math.exp(t.policy - t.proximal), t.advantage, bounds, config.dual_clip)
            terms.append(Term(weight * term.loss, weight * term.slope, term.clipped, masked))
        return terms

    return formula


def decoupled_ppo(sequence, config):
    return corrected(False, 0.0, 2.0, truncate=False)(sequence, config.model_copy(update={"is_floor": 0.0}))


def dis(sequence, config):
    low, high = clips(config, 0.3, 5.0)
    ratios = [math.exp(t.policy - t.behaviour) for t in sequence]
    return [weighted(r, t, masked=not low < r < high) for r, t in zip(ratios, sequence, strict=True)]


def topr(sequence, config):
    ratios = [math.exp(t.policy - t.behaviour) for t in sequence]
    if config.topr_ratio == "product":
        ratios = [math.prod(ratios)] * len(ratios)
    elif config.topr_ratio == "geometric":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    if sum(t.advantage for t in sequence) >= 0:
        return [weighted(1.0, t) for t in sequence]
    return [weighted(min(max(r, 0.0), 1.0), t, clipped=r > 1) for r, t in zip(ratios, sequence, strict=True)]


def chunk_topr(sequence, config):
    terms = []
    for t in sequence:
        chunk = [other for other in sequence if other.turn == t.turn]
        ratio = math.prod(math.exp(o.policy - o.proximal) for o in chunk) ** (1 / len(chunk))
        mismatch = math.prod(math.exp(o.proximal - o.behaviour) for o in chunk) ** (1 / len(chunk))
        negative = sum(o.advantage for o in chunk) < 0
        masked = mismatch > (2.0 if config.is_cap is None else config.is_cap)
        weight = min(ratio, 1.0) if negative else 1.0
        terms.append(weighted(weight, t, clipped=negative and ratio > 1, masked=masked))
    return terms


def flash_reinforce(sequence, config):
    def divergence(t):
        p, q = math.exp(t.behaviour), math.exp(t.policy)
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    masked = sum(map(divergence, sequence)) / len(sequence) > config.kl_gate
    return [weighted(math.exp(t.policy - t.behaviour), t, masked=masked) for t in sequence]


FORMULAS: dict[str, Formula] = {
    "pg": pg,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "sapo": sapo,
    "decoupled_ppo": decoupled_ppo,
    "tis": corrected(False, 0.0, 2.0, truncate=True),
    "mis": corrected(False, 0.5, 5.0, truncate=False),
    "seq_tis": corrected(True, 0.0, 2.0, truncate=True),
    "seq_mis": corrected(True, 0.0, 2.0, truncate=False),
    "dis": dis,
    "topr": topr,
    "chunk_topr": chunk_topr,
    "raft": pg,
    "raft_pp": ppo,
    "flash_reinforce": flash_reinforce,
    "kimi": kimi,
}
