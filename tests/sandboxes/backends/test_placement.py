"""The order of hosts for a new sandbox."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkit.sandboxes.backends.remote.placement import HostState, order

shares = st.floats(0, 1)
states = st.builds(
    HostState,
    reachable=st.booleans(),
    trusted=st.booleans(),
    accepting=st.booleans(),
    used=st.integers(0, 20),
    limit=st.integers(1, 20),
    pending=st.integers(0, 20),
    cpu=shares,
    memory=shares,
    disk=shares,
)
hosts = st.lists(states, max_size=8)


@given(hosts, st.randoms(use_true_random=False), st.sets(st.integers(0, 7)))
def test_every_usable_host_is_asked_once(hosts: list[HostState], rng: random.Random, avoid: set[int]) -> None:
    usable = [index for index, host in enumerate(hosts) if host.reachable and host.accepting]
    assert sorted(order(hosts, rng, avoid)) == usable


@given(hosts, st.randoms(use_true_random=False), st.sets(st.integers(0, 7)))
def test_worse_hosts_come_later(hosts: list[HostState], rng: random.Random, avoid: set[int]) -> None:
    """Full hosts are last, and before them hosts that are not trusted, to be avoided, and near a watermark."""
    ranks = [
        (host.load >= 1, not host.trusted, index in avoid, max(host.memory, host.disk) >= 0.85)
        for index, host in enumerate(hosts)
    ]
    found = [ranks[index] for index in order(hosts, rng, avoid)]
    assert found == sorted(found)


@given(st.lists(states, min_size=2, max_size=2), st.randoms(use_true_random=False))
def test_of_two_equally_good_hosts_the_less_loaded_is_first(pair: list[HostState], rng: random.Random) -> None:
    same = {"reachable": True, "trusted": True, "accepting": True, "cpu": 0.0, "memory": 0.0, "disk": 0.0}
    pair = [replace(host, limit=100, **same) for host in pair]
    first, second = order(pair, rng)
    assert pair[first].load <= pair[second].load


def test_the_most_loaded_host_is_never_first() -> None:
    rng = random.Random(1)
    loads = [HostState(used=used, limit=10) for used in (5, 3, 9, 1)]
    first = Counter(order(loads, rng)[0] for _ in range(1000))
    assert 2 not in first
    assert first[3] > 500


def test_a_large_host_gets_its_share() -> None:
    rng = random.Random(2)
    hosts = [HostState(limit=limit) for limit in (320, 20, 20, 20, 20)]
    for _ in range(200):
        chosen = order(hosts, rng)[0]
        hosts[chosen] = replace(hosts[chosen], used=hosts[chosen].used + 1)
    assert all(0.3 < host.load < 0.7 for host in hosts)


@pytest.mark.parametrize(
    ("number", "clients", "each", "first"), [(2, 8, 8, 0), (100, 64, 16, 0), (100, 64, 16, -30), (4, 8, 16, -20)]
)
def test_clients_that_create_at_the_same_time_spread_evenly(number: int, clients: int, each: int, first: int) -> None:
    """No client sees what the others create; one host may be emptier than the rest at the start."""
    rng = random.Random(3)
    start = [max(0, -first)] * number
    start[0] += first
    used = list(start)
    for _ in range(clients):
        seen = [HostState(used=used, limit=256) for used in start]
        for _ in range(each):
            chosen = order(seen, rng)[0]
            seen[chosen] = replace(seen[chosen], pending=seen[chosen].pending + 1)
            used[chosen] += 1
    # The least loaded host of all would get everything here, and become up to 500 sandboxes fuller than the others.
    assert max(used) - min(used) <= 30
