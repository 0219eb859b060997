"""The breaker opens on failures and slowness, passes a few trial calls, and ignores stale and cancelled calls."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import BreakerOpen, EngineUnavailable, ImageError, SandboxLost, StartTimeout
from agentkit.sandboxes.pool.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(**kwargs) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(time=clock, **kwargs), clock


def fail(breaker: Breaker, error: BaseException | None = None) -> None:
    with pytest.raises(type(error) if error else EngineUnavailable), breaker.call("create"):
        raise error or EngineUnavailable("refused")


def succeed(breaker: Breaker, clock: Clock, duration: float = 0.2, operation: str = "create") -> None:
    with breaker.call(operation):
        clock.now += duration


def test_opens_after_ten_failures_and_not_before():
    breaker, _ = make()
    for _ in range(9):
        fail(breaker)
    assert breaker.state == "closed"
    fail(breaker)
    assert breaker.state == "open"
    with pytest.raises(BreakerOpen, match="refused") as caught, breaker.call("create"):
        pytest.fail("a call passed an open breaker")
    assert 0 < caught.value.details["retry_after"] <= 15


def test_opens_when_half_of_the_window_failed():
    breaker, clock = make()
    for _ in range(20):
        succeed(breaker, clock)
    for _ in range(9):
        fail(breaker)
    assert breaker.state == "closed"
    fail(breaker)
    assert breaker.state == "open"


def test_failures_of_sandboxes_do_not_count():
    breaker, _ = make()
    for _ in range(50):
        fail(breaker, SandboxLost("it died", reason="exited"))
        fail(breaker, StartTimeout("its setup failed", phase="setup", log_tail=""))
    assert breaker.state == "closed"
    for _ in range(10):
        fail(breaker, StartTimeout("the engine did not start it", phase="start", log_tail=""))
    for _ in range(10):
        if breaker.state == "closed":
            fail(breaker, SandboxLost("the engine is gone", reason="engine_down"))
    assert breaker.state == "open"


def test_invalid_requests_do_not_count():
    breaker, _ = make()
    for _ in range(50):
        fail(breaker, ImageError("no such image"))
    assert breaker.state == "closed"


def test_two_trials_close_and_one_failure_opens_again():
    breaker, clock = make()
    breaker.trip("crash loop")
    clock.now += 15
    assert breaker.state == "half_open"
    assert breaker.room == 2
    with breaker.call("create"), breaker.call("create"):
        assert breaker.room == 0
        with pytest.raises(BreakerOpen), breaker.call("create"):
            pass
    assert breaker.state == "closed"
    breaker.trip("again")
    clock.now += 15
    succeed(breaker, clock)
    fail(breaker)
    assert breaker.state == "open"
    assert breaker.retry_after == 15
    assert breaker.opened == 3


def test_cancelled_trial_is_not_counted():
    breaker, clock = make()
    breaker.trip("x")
    clock.now += 15
    for _ in range(5):
        with pytest.raises(asyncio.CancelledError), breaker.call("create"):
            raise asyncio.CancelledError
    assert breaker.room == 2
    assert breaker.state == "half_open"


def test_call_from_before_a_change_of_state_is_ignored():
    breaker, clock = make()
    early = breaker.call("create")
    early.__enter__()
    breaker.trip("meanwhile")
    clock.now += 15
    assert breaker.state == "half_open"
    news = EngineUnavailable("late news")
    assert not early.__exit__(type(news), news, None)
    assert breaker.state == "half_open"
    assert breaker.room == 2


def test_slowness_is_judged_by_operation_and_becomes_normal():
    breaker, clock = make()
    for _ in range(20):
        succeed(breaker, clock, 0.3)
        succeed(breaker, clock, 3.0, "pull")  # ten times slower than a create, which is normal
    assert breaker.state == "closed"
    calls = 0
    while breaker.state == "closed":
        succeed(breaker, clock, 2.0)
        calls += 1
    assert calls <= 20
    assert "usually 0.30 s" in breaker.cause
    for _ in range(20):  # a lasting slowdown is accepted in the end
        clock.now += 15
        for _ in range(12):
            if breaker.state != "open":
                succeed(breaker, clock, 2.0)
    for _ in range(30):
        succeed(breaker, clock, 2.0)
    assert breaker.state == "closed"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "cancel", "wait", "begin", "end"]), st.floats(0, 20))))
def test_trials_are_limited_and_nothing_passes_while_open(steps):
    breaker, clock = make(min_calls=4, window=6)
    open_calls = []
    for step, amount in steps:
        state = breaker.state
        if step == "wait":
            clock.now += amount
        elif step == "end":
            if open_calls:
                open_calls.pop(0)[0].__exit__(None, None, None)
        elif step == "begin":
            call = breaker.call("create")
            try:
                call.__enter__()
                assert state != "open"
                open_calls.append((call, breaker._epoch))
            except BreakerOpen:
                assert state != "closed"
        else:
            error = {"ok": None, "fail": EngineUnavailable("no"), "cancel": asyncio.CancelledError()}[step]
            try:
                with breaker.call("create"):
                    if error is not None:
                        raise error
            except (BreakerOpen, EngineUnavailable, asyncio.CancelledError):
                pass
        if breaker.state == "half_open":
            under_way = sum(epoch == breaker._epoch for _, epoch in open_calls)
            assert under_way <= 2
            assert breaker.room == 2 - under_way
    for call, _ in open_calls:
        call.__exit__(None, None, None)
