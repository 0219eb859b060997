"""The memory of idle sessions: budget, order of eviction, prefixes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkit.trainers.inference.batch import common_length
from agentkit.trainers.inference.sessions import SessionStore, Stored, common_prefix

NOTHING = (torch.empty(0), torch.empty(0))


def stored(length: int) -> Stored:
    return Stored(np.arange(length, dtype=np.int32), NOTHING)


def test_least_recently_stored_goes_first() -> None:
    store = SessionStore(10)
    for name in "abc":
        store.put(name, stored(3))
    kept = store.get("a")
    assert kept is not None
    store.put("a", kept)
    store.put("d", stored(3))
    assert store.get("b") is None
    assert [store.get(name) for name in "dac"] == list(store.latest())
    for name in "acd":
        store.forget(name)
    assert (len(store), store.tokens) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8), st.booleans())))
def test_the_budget_is_never_exceeded(events: list[tuple[str, int, bool]]) -> None:
    store, held = SessionStore(12), 0
    for name, length, forget in events:
        if forget:
            store.forget(name)
        else:
            store.put(name, stored(length))
            kept = store.get(name)
            assert kept is not None
            assert len(kept.ids) == length
            store.put(name, kept)
        held = store.tokens
        assert 0 <= held <= 12
    store.clear()
    assert (len(store), store.tokens) == (0, 0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=64))
def test_common_length_is_the_cheapest(lengths: list[int]) -> None:
    def cost(width: int) -> int:
        return len(lengths) * width + 300 * sum(length > width for length in lengths)

    assert cost(common_length(lengths)) == min(cost(width) for width in lengths)
