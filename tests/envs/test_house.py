"""How environments are spread over sandboxes."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.envs.house import choose


def seat(fills: list[int], share: int, spread: int) -> None:
    chosen = choose(fills, share, spread)
    if chosen is None:
        fills.append(1)
    else:
        fills[chosen] += 1


@pytest.mark.parametrize(("number", "share", "rooms", "most"), [(7, 64, 7, 1), (16, 64, 15, 2), (128, 64, 15, 9)])
def test_losing_a_sandbox_loses_at_most_an_eighth(number: int, share: int, rooms: int, most: int) -> None:
    fills: list[int] = []
    for _ in range(number):
        seat(fills, share, 8)
    assert (len(fills), max(fills)) == (rooms, most)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 12))
def test_no_sandbox_holds_too_many_and_there_are_no_more_than_needed(number: int, share: int, spread: int) -> None:
    fills: list[int] = []
    for taken in range(1, number + 1):
        seat(fills, share, spread)
        assert max(fills) <= min(share, max(1, taken // spread))
    assert len(fills) <= max(2 * spread - 1, ceil(number / share))


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 8), st.integers(1, 8))
def test_the_emptiest_is_taken(fills: list[int], share: int, spread: int) -> None:
    chosen = choose(fills, share, spread)
    if chosen is not None:
        assert fills[chosen] == min(fills)
        assert fills[chosen] < share


def test_a_spread_of_one_fills_as_few_as_possible() -> None:
    fills: list[int] = []
    for _ in range(130):
        seat(fills, 64, 1)
    assert len(fills) == 3
