"""When a client takes a server for silent, down or untrustworthy."""

from __future__ import annotations

import pytest

from agentkit.sandboxes.backends.remote.health import PATIENCE, TICK, HostHealth


class Watched:
    """The health of a server, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.health = HostHealth()
        self.health.connect(self.now)

    def silence(self, seconds: float, step: float = TICK) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(self.now + step, end)
            self.health.pass_time(self.now)

    def lose(self) -> None:
        self.silence(PATIENCE + TICK)
        assert self.health.state == "down"


def test_a_new_server_is_down_until_it_answers() -> None:
    health = HostHealth()
    assert health.state == "down"
    health.connect(5.0)
    assert (health.state, health.reason) == ("up", "")


def test_silence() -> None:
    watched = Watched()
    watched.silence(1.4)
    assert watched.health.state == "up"
    watched.silence(0.6)
    assert watched.health.state == "silent"
    assert not watched.health.trusted(watched.now)
    watched.silence(1.8)
    watched.health.hear()  # late by almost its patience
    assert watched.health.state == "up"
    watched.silence(PATIENCE - TICK)
    assert watched.health.state == "silent"
    watched.silence(2 * TICK)
    assert watched.health.state == "down"
    assert "silent for 4" in watched.health.reason
    watched.health.hear()  # the end of an answer from before
    assert watched.health.state == "down"


def test_the_lateness_of_the_client_is_not_silence_of_the_server() -> None:
    watched = Watched()
    watched.silence(60.0, step=10.0)
    assert watched.health.state != "down"


def test_refused_connections() -> None:
    watched = Watched()
    watched.health.refuse(10.0)
    watched.health.refuse(10.1)
    assert watched.health.state == "up"
    watched.health.hear()  # it was only restarting a listener
    watched.health.refuse(10.4)
    watched.health.refuse(10.55)
    assert watched.health.state == "up"
    watched.health.refuse(10.65)
    assert (watched.health.state, watched.health.reason) == ("down", "it refuses connections")


def test_a_flapping_server_is_trusted_later_each_time() -> None:
    watched = Watched()
    waits = []
    for _ in range(6):
        watched.lose()
        watched.health.connect(watched.now)
        start = watched.now
        while not watched.health.trusted(watched.now):
            watched.now += 1.0
            watched.health.hear()
            watched.health.pass_time(watched.now)
        waits.append(watched.now - start)
    assert waits == pytest.approx([0.0, 10.0, 30.0, 90.0, 270.0, 300.0])
    watched.now += 700.0
    watched.lose()
    watched.health.connect(watched.now)
    assert watched.health.trusted(watched.now)  # forgiven


def test_an_announced_restart_is_awaited_and_no_longer() -> None:
    watched = Watched()
    watched.health.announce_restart(watched.now, 30.0)
    watched.silence(29.0)
    for _ in range(100):
        watched.health.refuse(watched.now)
    assert (watched.health.state, watched.health.trusted(watched.now)) == ("restarting", False)
    watched.health.connect(watched.now)
    assert (watched.health.state, watched.health.trusted(watched.now)) == ("up", True)
    watched.health.announce_restart(watched.now, 30.0)
    watched.silence(30.0 + TICK)
    assert watched.health.state == "down"
