"""The state machine of a sandbox."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.errors import InvalidTransition
from agentkit.sandboxes.lifecycle import HISTORY, TRANSITIONS, WORKING, Lifecycle
from agentkit.sandboxes.types import State, Transition

STATES: tuple[State, ...] = get_args(State)


def test_every_state_has_its_transitions() -> None:
    assert set(TRANSITIONS) == set(STATES)
    for state, following in TRANSITIONS.items():
        assert following <= set(STATES)
        assert ("stopping" in following) == (state not in ("stopping", "removed"))
    assert TRANSITIONS["removed"] == frozenset()
    assert all("unhealthy" in TRANSITIONS[state] for state in WORKING)


@given(st.lists(st.sampled_from(STATES), max_size=60))
def test_only_legal_transitions_happen(wanted: list[State]) -> None:
    life = Lifecycle("ak-0")
    seen: list[Transition] = []
    life.watch(seen.append)
    for state in wanted:
        before, generation = life.state, life.generation
        if state in TRANSITIONS[before]:
            assert life.can(state)
            transition = life.to(state, "because")
            assert (transition.before, transition.after, transition.cause) == (before, state, "because")
            assert life.generation == generation + (state in ("starting", "recovering")) == transition.generation
        else:
            with pytest.raises(InvalidTransition, match=f"is {before} and cannot become {state}"):
                life.to(state, "because")
            assert (life.state, life.generation) == (before, generation)
    assert life.history == seen[-HISTORY:]
    assert all(one.after == two.before for one, two in itertools.pairwise(seen))


def test_calls_do_not_displace_causes() -> None:
    now = iter(range(10**6))
    life = Lifecycle("ak-0", monotonic=lambda: float(next(now)), wall=lambda: 5.0)
    for state in ("creating", "starting", "ready"):
        life.to(state, "begin")
    for _ in range(1000):
        life.to("busy", "exec")
        life.to("ready", "done")
    life.to("unhealthy", "why")
    history = life.history
    assert [item.cause for item in history[:3]] == ["begin"] * 3
    assert history[-1].cause == "why"
    assert len(history) == HISTORY + 4
    assert [item.monotonic for item in history] == sorted(item.monotonic for item in history)
    assert {item.wall for item in history} == {5.0}


def test_stopped_watcher_gets_no_transitions() -> None:
    life, seen = Lifecycle("ak-0"), []
    stop = life.watch(seen.append)
    life.to("creating", "a")
    stop()
    stop()
    life.to("starting", "b")
    assert [item.cause for item in seen] == ["a"]
