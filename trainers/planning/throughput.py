"""How long a training step takes for a split of GPUs between engines and learner, as closed forms.

Invariant: pure arithmetic on ``Rates``; nothing is measured here. With ``W`` engine-GPU-seconds to generate a batch,
``M`` learner-GPU-seconds to train on it, and ``L`` seconds for the longest episode alone (Lu et al. 2025, ROLL Flash,
arXiv:2510.11345, propositions 1 and 2, with their bounds as estimates):

- all GPUs take turns (colocated, synchronous): ``(W + M) / gpus + L``;
- ``k`` engines beside ``n`` learner GPUs, synchronous: ``W / k + L + M / n``;
- the same with async ratio ``a > 0``: ``max(W / k + L / (1 + a), M / n)``.

``benchmarks/scale`` compares these forms with the real scheduler in virtual time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CONTROLLER_S = 170e-6
"""Processor time of the controller per turn: rollout loop with new observations, channel and router."""
RATIOS = (0.0, 1.0, 2.0, 4.0)
"""Async ratios that are considered."""
ENOUGH = 1.05
"""The smallest ratio is recommended whose step takes at most this many times as long as with the largest."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a training step needs.

    Attributes:
        generation: engine-GPU-seconds to generate a batch with full engines (``W``).
        training: learner-GPU-seconds to train on it (``M``).
        longest: seconds of the longest episode, alone on an engine (``L``).
        turns: turns of all episodes of a batch.
    """

    generation: float
    training: float
    longest: float
    turns: float


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of engines and learner, with the resulting step."""

    engines: int
    learners: int
    async_ratio: float
    step_s: float

    def turns_per_s(self, rates: Rates) -> float:
        return rates.turns / self.step_s


def step_s(rates: Rates, engines: int, learners: int, async_ratio: float) -> float:
    """Return the seconds of a training step with separate GPUs for engines and learner."""
    generation, training = rates.generation / engines, rates.training / learners
    if async_ratio == 0:
        return generation + rates.longest + training
    return max(generation + rates.longest / (1 + async_ratio), training)


def colocated_s(rates: Rates, gpus: int) -> float:
    """Return the seconds of a synchronous step in which all GPUs generate, then all train."""
    return (rates.generation + rates.training) / gpus + rates.longest


def best(rates: Rates, gpus: int, async_ratio: float, unit: int = 1) -> Split:
    """Return the fastest split of ``gpus``; engines get a multiple of ``unit`` GPUs.

    Raises:
        ValueError: fewer than ``unit + 1`` GPUs cannot be split.
    """
    splits = [
        Split(engines, gpus - engines, async_ratio, step_s(rates, engines, gpus - engines, async_ratio))
        for engines in range(unit, gpus, unit)
    ]
    if not splits:
        raise ValueError(f"{gpus} GPUs cannot be split: engines take {unit}, the learner at least 1")
    return min(splits, key=lambda split: split.step_s)


def recommend(rates: Rates, gpus: int, unit: int = 1) -> Split:
    """Return the fastest split with the smallest async ratio that is fast enough (``ENOUGH``)."""
    found = [best(rates, gpus, ratio, unit) for ratio in RATIOS]
    limit = ENOUGH * min(split.step_s for split in found)
    return next(split for split in found if split.step_s <= limit)


def controllers(turns_per_s: float) -> int:
    """Return the number of processor cores that the controller's work fills; more than one is its limit."""
    return math.ceil(turns_per_s * CONTROLLER_S)
