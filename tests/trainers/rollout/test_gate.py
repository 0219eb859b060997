"""The gate under thousands of random schedules: it keeps the bound, loses no group and never deadlocks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.trainers.rollout.gate import Gate


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, float, int, str, list[int]]:
    ratio = draw(st.sampled_from([0, 0.1, 0.25, 0.5, 0.7, 1, 1.15, 1.5, 2, 2.34, 3, 5]) | st.floats(0, 4))
    return (
        draw(st.integers(1, 6)),
        ratio,
        draw(st.integers(0, 4)),
        draw(st.sampled_from(["wait", "drop"])),
        draw(st.lists(st.integers(0, 1_000_000), min_size=1, max_size=300)),
    )


class Driver:
    """Plays a schedule against a gate, with a separate record of every group."""

    def __init__(self, batch: int, ratio: float, extra: int, policy: str) -> None:
        self.gate = Gate(batch, ratio, extra=extra, policy=policy)  # type: ignore[arg-type]
        self.batch, self.extra, self.policy = batch, extra, policy
        self.limit = math.ceil(ratio)
        self.capacity = math.floor((1 + Fraction(repr(float(ratio)))) * batch) + extra
        self.version = 0
        self.next = 0
        self.alive: dict[int, int] = {}
        self.ready: set[int] = set()
        self.training: set[int] = set()
        self.ended: dict[int, str] = {}

    def end(self, group: int, how: str) -> None:
        assert group in self.alive
        assert group not in self.ended
        self.ended[group] = how
        del self.alive[group]
        self.ready.discard(group)

    def act(self, choice: int) -> None:
        kind, choice = choice % 8, choice // 8
        running = [group for group in self.alive if group not in self.ready]
        if kind <= 1 and self.gate.room():
            self.start()
        elif kind <= 4 and running:
            group = running[choice % len(running)]
            self.gate.finish(group)
            self.ready.add(group)
        elif kind == 5 and self.alive:  # voided, or refilled for want of signal
            group = list(self.alive)[choice % len(self.alive)]
            self.gate.remove(group)
            self.end(group, "voided")
        elif kind == 6 and not self.training:
            self.take()
        elif kind == 7 and self.training:
            self.publish()

    def start(self) -> None:
        self.gate.start(self.next)
        self.alive[self.next] = self.version
        self.next += 1
        assert len(self.alive) + len(self.training) <= self.capacity

    def publish(self) -> None:
        self.version += 1
        self.gate.published(self.version)
        self.training.clear()

    def take(self) -> bool:
        take = self.gate.take()
        if take is None:
            return False
        assert len(take.batch) == self.batch
        assert len(take.cancelled) <= self.extra
        assert not (take.dropped and self.policy == "wait")
        for group in take.batch:
            assert group in self.ready
            assert self.version - self.alive[group] <= self.limit
            assert self.gate.staleness(group) == self.version - self.alive[group]
            self.end(group, "trained")
            self.training.add(group)
        for group in take.dropped:
            assert self.alive[group] + self.limit <= self.version  # no slot of a later version would take it
            self.end(group, "dropped")
        for group in take.cancelled:
            self.end(group, "cancelled")
        return True

    def drain(self, batches: int) -> None:
        """Finish groups in the worst order for the gate, youngest first; it must still make progress."""
        for _ in range(batches):
            if self.training:
                self.publish()
            for _ in range(1000):
                while self.gate.room():
                    self.start()
                if self.take():
                    break
                running = [group for group in self.alive if group not in self.ready]
                assert running, "deadlock: nothing runs, nothing may start, no batch"
                self.gate.finish(running[-1])
                self.ready.add(running[-1])
            else:
                raise AssertionError("livelock")


@settings(max_examples=1500, deadline=None)
@given(schedules())
def test_no_schedule_breaks_the_bound_loses_a_group_or_deadlocks(schedule) -> None:
    batch, ratio, extra, policy, choices = schedule
    driver = Driver(batch, ratio, extra, policy)
    for choice in choices:
        driver.act(choice)
    driver.drain(4)
    gate = driver.gate
    assert set(gate.running) | set(gate.ready) == set(driver.alive)
    assert set(gate.ready) == driver.ready
    assert set(driver.ended) | set(driver.alive) == set(range(driver.next))


@settings(max_examples=300, deadline=None)
@given(schedules(), st.integers(1, 50))
def test_a_restored_gate_goes_on_as_the_first_one(schedule, seed: int) -> None:
    batch, ratio, extra, policy, choices = schedule
    driver = Driver(batch, ratio, extra, policy)
    for choice in choices:
        driver.act(choice)
    if driver.training:
        driver.publish()
    other = Gate(batch, ratio, extra=extra, policy=policy)  # type: ignore[arg-type]
    other.load(driver.gate.state())
    assert other.state() == driver.gate.state()
    assert (other.room(), other.running, other.ready) == (driver.gate.room(), driver.gate.running, driver.gate.ready)
    driver.gate = other
    driver.drain(3)


@pytest.mark.parametrize("extra", [0, 3])
def test_ratio_zero_is_synchronous(extra: int) -> None:
    gate = Gate(4, 0, extra=extra)
    assert gate.room() == 4 + extra
    for group in range(4 + extra):
        gate.start(group)
    assert gate.room() == 0
    for group in range(extra, 4 + extra):
        gate.finish(group)
    take = gate.take()
    assert take is not None
    assert take.batch == tuple(range(extra, 4 + extra))
    assert sorted(take.cancelled) == list(range(extra))
    assert gate.room() == 0  # nothing may start while the batch is trained
    gate.published(1)
    assert gate.room() == 4 + extra


def test_a_straggler_is_overtaken_until_its_deadline_and_then_waited_for() -> None:
    gate = Gate(1, 1)
    gate.start(0)  # the straggler, deadline 1
    gate.start(1)
    gate.finish(1)
    take = gate.take()
    assert take is not None
    assert take.batch == (1,)
    gate.published(1)
    gate.start(2)
    gate.finish(2)
    assert gate.take() is None  # 2 is ready, but version 1 is the last one that may use group 0
    gate.finish(0)
    take = gate.take()
    assert take is not None
    assert take.batch == (0,)
    assert gate.staleness(0) == 1


def test_drop_never_waits() -> None:
    gate = Gate(1, 1, policy="drop")
    gate.start(0)
    gate.start(1)
    gate.finish(1)
    gate.take()
    gate.published(1)
    gate.start(2)
    gate.finish(2)
    take = gate.take()
    assert take is not None
    assert (take.batch, take.dropped) == ((2,), (0,))


@pytest.mark.parametrize(("ratio", "capacity"), [(0.0, 100), (0.15, 115), (0.29, 129), (0.999, 199), (1.15, 215)])
def test_capacity_follows_the_decimal_that_was_written(ratio: float, capacity: int) -> None:
    assert Gate(100, ratio).capacity == capacity


def test_misuse_is_refused() -> None:
    gate = Gate(1, 1)
    gate.start(0)
    with pytest.raises(ValueError, match="already"):
        gate.start(0)
    with pytest.raises(RuntimeError, match="without a batch"):
        gate.published(1)
    gate.finish(0)
    gate.take()
    with pytest.raises(RuntimeError, match="one batch is trained"):
        gate.take()
    with pytest.raises(RuntimeError, match="save after"):
        gate.state()
    with pytest.raises(ValueError, match="each batch produces one version"):
        gate.published(2)
