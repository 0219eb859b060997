"""Spread of environments over sandboxes."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs.isolation.allocator import choose_sandbox


def allocate(fills: list[int], share: int, spread: int) -> None:
    chosen = choose_sandbox(fills, share, spread)
    if chosen is None:
        fills.append(1)
    else:
        fills[chosen] += 1


@pytest.mark.parametrize(("number", "share", "sandboxes", "most"), [(7, 64, 7, 1), (16, 64, 15, 2), (128, 64, 15, 9)])
def test_a_lost_sandbox_affects_at_most_an_eighth_of_the_environments(
    number: int, share: int, sandboxes: int, most: int
) -> None:
    fills: list[int] = []
    for _ in range(number):
        allocate(fills, share, 8)
    assert (len(fills), max(fills)) == (sandboxes, most)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 12))
def test_limits_of_environments_and_sandboxes(number: int, share: int, spread: int) -> None:
    fills: list[int] = []
    for taken in range(1, number + 1):
        allocate(fills, share, spread)
        assert max(fills) <= min(share, max(1, taken // spread))
    assert len(fills) <= max(2 * spread - 1, ceil(number / share))


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 8), st.integers(1, 8))
def test_the_emptiest_sandbox_is_chosen(fills: list[int], share: int, spread: int) -> None:
    chosen = choose_sandbox(fills, share, spread)
    if chosen is not None:
        assert fills[chosen] == min(fills)
        assert fills[chosen] < share


def test_a_spread_of_one_uses_the_fewest_sandboxes() -> None:
    fills: list[int] = []
    for _ in range(130):
        allocate(fills, 64, 1)
    assert len(fills) == 3
