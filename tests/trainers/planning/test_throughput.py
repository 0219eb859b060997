"""The closed forms of step times, and what is recommended from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.trainers.planning.throughput import RATIOS, Rates, best, colocated_s, controllers, recommend, step_s

WORK = st.floats(0.1, 1e4)


@settings(deadline=None)
@given(WORK, WORK, st.floats(0, 100), st.integers(2, 64))
def test_more_asynchrony_is_never_slower_and_never_beats_the_work(
    generation: float, training: float, longest: float, gpus: int
) -> None:
    rates = Rates(generation, training, longest, 1)
    times = [best(rates, gpus, ratio).step_s for ratio in RATIOS]
    assert times == sorted(times, reverse=True)
    assert times[-1] * gpus >= generation + training - 1e-6
    assert colocated_s(rates, gpus) <= times[0]  # separate GPUs wait for each other when nothing overlaps


def test_balanced_work_without_stragglers_is_split_in_proportion() -> None:
    found = best(Rates(generation=24.0, training=16.0, longest=0.0, turns=1), 40, 1.0)
    assert (found.engines, found.learners) == (24, 16)
    assert found.step_s == pytest.approx(1.0)


def test_the_smallest_sufficient_ratio_is_recommended() -> None:
    assert recommend(Rates(24.0, 16.0, 0.0, 1), 40).async_ratio == 1.0
    assert recommend(Rates(24.0, 16.0, 10.0, 1), 40).async_ratio == 4.0
    assert step_s(Rates(0.0, 16.0, 0.0, 1), 1, 16, 0.0) == 1.0


def test_engines_take_whole_units() -> None:
    assert best(Rates(24.0, 16.0, 0.0, 1), 40, 1.0, unit=8).engines == 24
    with pytest.raises(ValueError, match="cannot be split"):
        best(Rates(1.0, 1.0, 0.0, 1), 4, 1.0, unit=4)


def test_one_core_carries_under_six_thousand_turns_a_second() -> None:
    assert controllers(5_500) == 1
    assert controllers(6_500) == 2
