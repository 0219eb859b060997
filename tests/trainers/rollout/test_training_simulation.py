"""The simulation of training in virtual time: limits that are known in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.scale.training import Setup, Work, simulate


def test_one_engine_shares_its_time_and_a_synchronous_step_adds_up() -> None:
    """Equal answers on one crowded engine: the longest alone, the crowd's work, and the training step."""
    work = Work(answers=np.full(1, 2.0), steps=np.full(1, 3.0))
    setup = Setup(work, engines=1, train_s=5.0, groups=2, size=4, crowd=4.0, steps=2)
    assert simulate(setup).step_s == pytest.approx(2.0 * (1 + 8 / 4) + 3.0 + 5.0)


def test_training_limits_a_step_when_generation_is_fast() -> None:
    work = Work(answers=np.full(1, 0.1), steps=np.zeros(1))
    outcome = simulate(Setup(work, engines=2, train_s=5.0, groups=2, size=2, async_ratio=1.0, warmup=2))
    assert outcome.step_s == pytest.approx(5.0)
    assert outcome.staleness == 1.0


def test_stragglers_cost_less_with_asynchrony_and_outcomes_repeat() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(0, 1, 4096), 20)
    work = Work(answers=lengths, steps=np.zeros(1), turns=2)
    outcomes = [
        simulate(Setup(work, engines=4, train_s=1.0, groups=4, size=4, async_ratio=ratio, crowd=4.0, warmup=3))
        for ratio in (0.0, 2.0, 2.0)
    ]
    assert outcomes[1] == outcomes[2]
    assert outcomes[1].step_s < 0.8 * outcomes[0].step_s
    assert outcomes[1].at_once > outcomes[0].at_once == 16
