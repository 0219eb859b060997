"""Decisions of the scheduler: creations, retirement and crash loops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.errors import SandboxLost
from agentkit.sandboxes.pool.decisions import (
    CRASH_LOOP,
    ENGINE_FAILURES,
    SURPLUS_AFTER,
    CreationFailures,
    PoolSettings,
    creations,
    to_retire,
    why_not_reused,
)
from agentkit.sandboxes.pool.slots import Slots, SlotState

PATHS: dict[SlotState, list[SlotState]] = {
    "creating": [],
    "idle": ["idle"],
    "checking": ["idle", "checking"],
    "busy": ["idle", "busy"],
    "resetting": ["idle", "busy", "resetting"],
    "degraded": ["idle", "degraded"],
    "removing": ["idle", "removing"],
}


def settings(min_idle: int = 2, max_size: int = 8, refill_concurrency: int | None = None) -> PoolSettings:
    return PoolSettings(min_idle, max_size, 3, 3600.0, refill_concurrency, "wait")


def slots_in(*states: SlotState, max_size: int = 8, now: float = 0.0) -> Slots:
    slots = Slots(max_size, lambda: now)
    for state in sorted(states, key=lambda state: state != "removing"):
        slot = slots.open()
        for step in PATHS[state]:
            slots.move(slot, step)
    return slots


@pytest.mark.parametrize(
    ("states", "waiting", "created"),
    [
        ([], 0, 2),
        (["idle", "creating"], 0, 0),
        (["idle", "idle"], 1, 1),
        (["busy"] * 8, 5, 0),
        (["removing"] * 8, 1, 0),  # an engine that removes nothing gets no more work
        (["degraded"], 0, 2),
    ],
)
def test_creations(states: list[SlotState], waiting: int, created: int) -> None:
    assert creations(slots_in(*states), waiting, settings(refill_concurrency=2), at_once=4, one_by_one=False) == created


def test_idle_refill_is_slow_and_waiting_callers_use_the_whole_engine() -> None:
    assert creations(slots_in(), 0, settings(5, 100), at_once=4, one_by_one=False) == 1
    assert creations(slots_in(max_size=100), 50, settings(5, 100), at_once=4, one_by_one=False) == 4


def test_one_creation_at_a_time_until_a_sandbox_is_proven() -> None:
    slots = slots_in("idle")
    assert creations(slots, 5, settings(), at_once=4, one_by_one=True) == 0
    slots.idle()[0].proven = True
    assert creations(slots, 5, settings(), at_once=4, one_by_one=True) == 1


@given(
    st.lists(st.sampled_from(sorted(PATHS)), max_size=8), st.integers(0, 50), st.integers(0, 8), st.booleans(),
    st.none() | st.integers(1, 20),
)  # fmt: skip
def test_creations_are_bounded(
    states: list[SlotState], waiting: int, min_idle: int, one_by_one: bool, concurrency: int | None
) -> None:
    slots = slots_in(*states)
    number = creations(slots, waiting, settings(min_idle, 8, concurrency), at_once=4, one_by_one=one_by_one)
    assert 0 <= number <= slots.free
    assert number <= max(0, waiting + min_idle - slots.available)
    assert slots.count("removing") + number <= 8
    assert not one_by_one or number <= 1


def test_surplus_and_old_sandboxes_are_retired() -> None:
    slots = slots_in("idle", "idle", "idle", "busy")
    assert to_retire(slots, settings(), SURPLUS_AFTER - 1) == []
    (surplus,) = to_retire(slots, settings(), SURPLUS_AFTER)
    assert surplus == (slots.idle()[0], "surplus")
    assert [reason for _, reason in to_retire(slots, settings(), 3600.0)] == ["old"] * 3


def test_sandbox_is_reused_until_max_uses_or_max_age() -> None:
    (slot,) = slots_in("busy")
    slot.uses = 2
    assert why_not_reused(slot, settings(), 3599.0) == ""
    assert why_not_reused(slot, settings(), 3600.0) == "old"
    slot.uses = 3
    assert why_not_reused(slot, settings(), 0.0) == "used"


def test_engine_failures_open_the_breaker_and_a_success_ends_them() -> None:
    failures = CreationFailures(random.Random(0))
    for _ in range(2):
        assert [failures.engine_failed(OSError(), 0.0) for _ in range(ENGINE_FAILURES)] == [""] * ENGINE_FAILURES
        assert "failed, the last with" in failures.engine_failed(OSError(), 0.0)
        failures.engine_worked()
        assert failures.not_before == 0.0


def test_only_a_sandbox_that_lives_ends_a_crash_loop() -> None:
    failures, now = CreationFailures(random.Random(0)), 0.0
    for _ in range(CRASH_LOOP + 1):
        assert failures.crash_loop(now) is None
        failures.sandbox_failed(SandboxLost("died"), now, began=now, died=True)
        assert failures.count == 1 or failures.one_by_one
        failures.sandbox_started()
        now += 100.0
    assert failures.crash_loop(now - 100.0)
    assert failures.crash_loop(failures.not_before) is None
    failures.sandbox_lived()
    assert (failures.count, failures.crash_loop(0.0), failures.last_error) == (0, None, None)
