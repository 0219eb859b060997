"""Who is in a pool and what with: places, their states, and the sums that must hold.

Invariant: every place is in exactly one state; the places that count never exceed ``max_size``; whoever waits is served
in the order of arrival. Nothing here awaits, so that each change is seen whole or not at all.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentkit.sandboxes.sandbox import Sandbox

PlaceState = Literal["creating", "idle", "checking", "busy", "resetting", "degraded", "removing", "gone"]

_NEXT: Mapping[PlaceState, frozenset[PlaceState]] = {
    "creating": frozenset({"idle", "busy", "removing", "gone"}),
    "idle": frozenset({"busy", "checking", "degraded", "removing"}),
    "checking": frozenset({"idle", "degraded", "removing"}),
    "busy": frozenset({"idle", "resetting", "removing"}),
    "resetting": frozenset({"idle", "removing"}),
    "degraded": frozenset({"idle", "removing"}),
    "removing": frozenset({"gone"}),
    "gone": frozenset(),
}

COUNTED: frozenset[PlaceState] = frozenset({"creating", "idle", "checking", "busy", "resetting", "degraded"})
"""States that take one of the ``max_size`` places."""


class Place:
    """One place of a pool and the sandbox in it, from the decision to create it until it is removed."""

    def __init__(self, now: float, *, extra: bool) -> None:
        self.state: PlaceState = "creating"
        self.sandbox: Sandbox | None = None
        self.born = now
        self.since = now
        """When it came into its state."""
        self.uses = 0
        self.epoch = 0
        """Counts changes of state: what was decided about an earlier one is void."""
        self.extra = extra
        """Beyond ``max_size``, for one use."""
        self.proved = False
        """It has been used, or has lived long enough to say that creation works."""
        self.paused = False
        self.ill = ""
        """Why it must not be used again, should it be in use now."""
        self.watchers: list[Callable[[str], None]] = []
        """Told when it falls ill in use."""
        self.unwatch: Callable[[], None] = lambda: None
        """Ends the watch over its sandbox."""

    @property
    def box(self) -> Sandbox:
        assert self.sandbox is not None, f"a place that is {self.state} has no sandbox yet"
        return self.sandbox

    def fall_ill(self, reason: str) -> None:
        if not self.ill:
            self.ill = reason
            for tell in list(self.watchers):
                tell(reason)


class Ledger:
    """All places of one pool."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._places: dict[Place, None] = {}
        self._counts: dict[PlaceState, int] = dict.fromkeys(_NEXT, 0)
        self._extra = 0

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._places))

    def count(self, *states: PlaceState) -> int:
        """Places within ``max_size`` in one of these states (and ``removing`` ones)."""
        return sum(self._counts[state] for state in states)

    @property
    def size(self) -> int:
        return self.count(*COUNTED)

    @property
    def extra(self) -> int:
        """Places beyond ``max_size``."""
        return self._extra

    @property
    def room(self) -> int:
        return self.max_size - self.size

    def open(self, now: float, *, extra: bool = False) -> Place:
        """Take a place for a sandbox that is to be created."""
        assert extra or self.room > 0, f"a pool of {self.max_size} is full"
        place = Place(now, extra=extra)
        self._places[place] = None
        self._add(place, 1)
        return place

    def move(self, place: Place, state: PlaceState, now: float) -> None:
        assert state in _NEXT[place.state], f"a place cannot go from {place.state} to {state}"
        self._add(place, -1)
        place.state = state
        place.since = now
        place.epoch += 1
        self._add(place, 1)
        if state == "gone":
            del self._places[place]

    def idle(self) -> list[Place]:
        """Those that can be handed out, the one that has waited longest first."""
        return sorted((place for place in self._places if place.state == "idle"), key=lambda place: place.since)

    def _add(self, place: Place, number: int) -> None:
        if place.state == "gone":
            return
        if place.extra and place.state in COUNTED:
            self._extra += number
        else:
            self._counts[place.state] += number


@dataclass
class Counters:
    """What has happened in a pool since it started."""

    created: int = 0
    create_failures: int = 0
    acquired: int = 0
    hits: int = 0
    """Acquired without waiting for a creation."""
    exhausted: int = 0
    """Calls that got ``PoolExhausted``."""
    rejected: int = 0
    """Sandboxes that were found bad when they were about to be handed out."""
    reset: int = 0
    retired: dict[str, int] = field(default_factory=dict)
    """Sandboxes taken out of the pool, by reason."""
    left_behind: int = 0
    """Sandboxes that the engine did not remove in time; the reaper will."""


@dataclass(frozen=True)
class PoolStats:
    """A pool at one moment: ``idle + busy + creating + degraded == size <= max_size``."""

    size: int
    idle: int
    """Ready, or being checked."""
    busy: int
    creating: int
    """Being created, or reset."""
    degraded: int
    """Set aside because they are slow."""
    removing: int
    extra: int
    """Beyond ``max_size``, of ``on_exhausted="create"``."""
    waiting: int
    """Callers in line."""
    breaker: str
    pressure: str | None
    """Why the host takes no more sandboxes."""
    counters: Counters


class Waiter:
    """Someone in line."""

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket
        self.served: asyncio.Future[Place] = asyncio.get_running_loop().create_future()


class Line:
    """Those who wait, by order of arrival; who got a bad sandbox comes back with the old ticket."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def ticket(self) -> int:
        return next(self._tickets)

    def join(self, ticket: int) -> Waiter:
        waiter = Waiter(ticket)
        bisect.insort(self._waiters, waiter, key=lambda waiter: waiter.ticket)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def first(self) -> Waiter:
        return self._waiters[0]

    def serve(self, place: Place) -> None:
        self._waiters.pop(0).served.set_result(place)

    def turn_away(self, error: Callable[[], Exception]) -> None:
        """Everybody gets an error of their own."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.served.set_exception(error())
