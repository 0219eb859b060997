"""Choose the host of a new sandbox.

Invariant: pure; random numbers come from the caller's generator. A host that is down or accepts nothing is never
chosen; every other host is in the order, so that a creation that one host refuses can go to the next.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NEAR_WATERMARK = 0.85
"""Share of the memory or disk in use from which a host is chosen only if no other is free. By default hosts refuse
sandboxes from 90 %."""


@dataclass(frozen=True)
class HostState:
    """What a client knows about a host."""

    reachable: bool = True
    """False once the host counts as down."""
    trusted: bool = True
    """False while the host is silent, and for some time after it was down repeatedly."""
    accepting: bool = True
    """Whether the host takes new sandboxes."""
    reason: str = ""
    """Why it does not."""
    used: int = 0
    """Number of sandboxes on the host, of all clients."""
    limit: int = 1
    """Largest number of sandboxes on the host."""
    pending: int = 0
    """Number of sandboxes that this client is creating on the host."""
    cpu: float = 0.0
    """Share of the processors in use, between 0 and 1; decides between equal loads."""
    memory: float = 0.0
    """Share of the memory in use."""
    disk: float = 0.0
    """Share of the disk in use."""

    @property
    def load(self) -> float:
        """Share of ``limit`` that is in use or will be."""
        return (self.used + self.pending) / self.limit

    @property
    def near_watermark(self) -> bool:
        return max(self.memory, self.disk) >= NEAR_WATERMARK


def order(hosts: Sequence[HostState], rng: random.Random, avoid: Collection[int] = ()) -> list[int]:
    """Return the hosts that can be asked to create a sandbox, in the order in which to ask them.

    The first is the less loaded of two hosts that are drawn at random, weighted by their free capacity. With two hosts
    that is the less loaded one. With more, it keeps the loads almost as even as choosing the least loaded of all, but
    clients that create sandboxes at the same time do not all choose the same host because of a load that is out of
    date by then, and a host that returns empty does not get all new sandboxes.

    Args:
        hosts: the state of each host.
        rng: the source of randomness.
        avoid: indices of hosts to choose only if no other host has room.

    Returns:
        Indices of ``hosts``. Full hosts come last, because one of their sandboxes may just have been removed; before
        them come hosts that are not trusted, then hosts to avoid, then hosts near a watermark.
    """

    def rank(index: int) -> tuple[bool, bool, bool, bool]:
        host = hosts[index]
        return host.load >= 1, not host.trusted, index in avoid, host.near_watermark

    def load(index: int) -> tuple[float, float]:
        return hosts[index].load, hosts[index].cpu

    usable = [index for index, host in enumerate(hosts) if host.reachable and host.accepting]
    rng.shuffle(usable)  # equal hosts are chosen equally often
    usable.sort(key=lambda index: (rank(index), load(index)))
    best = [index for index in usable if rank(index) == rank(usable[0])]
    if len(best) > 2:
        first = min(_draw_two(best, hosts, rng), key=load)
        usable.remove(first)
        usable.insert(0, first)
    return usable


def _draw_two(indices: Sequence[int], hosts: Sequence[HostState], rng: random.Random) -> list[int]:
    """Draw two different hosts, each with a probability proportional to its free capacity."""

    def key(index: int) -> float:
        host = hosts[index]
        return rng.random() ** (1 / max(host.limit - host.used - host.pending, 1))

    return sorted(indices, key=key)[-2:]
