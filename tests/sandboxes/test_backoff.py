"""Waits grow, are jittered over their whole range, and are capped; restarts are counted in a sliding window."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from agentkit.sandboxes.backoff import Backoff, FailureStreak, RestartLimit
from agentkit.sandboxes.pool.decisions import RESTARTS


@given(st.integers(0, 10_000), st.integers())
def test_a_delay_is_within_its_ceiling(failures, seed):
    backoff = Backoff()
    assert 0 <= backoff.delay(failures, random.Random(seed)) <= backoff.ceiling(failures) <= 30


def test_ceilings_double_up_to_the_cap():
    assert [Backoff().ceiling(n) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_jitter_is_full():
    rng = random.Random(0)
    delays = [Backoff().delay(5, rng) for _ in range(1000)]
    assert min(delays) < 0.1
    assert max(delays) > 7.9
    assert 3.7 < sum(delays) / len(delays) < 4.3


def test_three_restarts_a_minute():
    restarts = RestartLimit()
    assert [restarts.allow(now) for now in (0, 10, 20, 30, 59.9)] == [True, True, True, False, False]
    assert restarts.allow(60)  # the first has left the window
    assert not restarts.allow(60)
    assert restarts.allow(70)


@given(st.lists(st.floats(0, 20), max_size=100))
def test_never_more_than_the_limit_in_any_window(gaps):
    restarts, now, allowed = RestartLimit(3, 60), 0.0, []
    for gap in gaps:
        now += gap
        if restarts.allow(now):
            allowed.append(now)
    for start in allowed:
        assert sum(start <= time < start + 60 for time in allowed) <= 3


def test_failures_add_up_until_a_success():
    streak = FailureStreak(random.Random(0))
    for number in range(1, 6):
        streak.add(OSError(f"{number}"), 100.0)
        assert 100 <= streak.not_before <= 100 + Backoff().ceiling(number)
    assert (streak.count, str(streak.error)) == (5, "5")
    streak.clear()
    assert (streak.count, streak.error, streak.not_before) == (0, None, 0.0)


def test_failures_of_one_event_count_once():
    streak = FailureStreak(random.Random(0))
    for began, count in [(0.0, 1), (1.0, 1), (99.0, 1), (100.0, 1), (100.1, 2), (100.2, 3)]:
        streak.add(OSError(), 100.0 + count - 1, began=began)
    assert streak.count == 2
    streak.add(OSError(), 120.0, began=110.0)
    assert (streak.count, streak.last) == (3, 120.0)


def test_restarts_of_a_crash_loop_are_few():
    """Three quick restarts in half a minute, then two or three per minute."""
    for seed in range(100):
        streak, now, times = FailureStreak(random.Random(seed), RESTARTS), 0.0, []
        for _ in range(12):
            streak.add(OSError(), now, began=now)
            now = streak.not_before + 0.01
            times.append(now)
        assert times[1] < 4
        assert times[2] < 25
        assert all(19 < later - earlier < 31 for earlier, later in itertools.pairwise(times[3:]))
