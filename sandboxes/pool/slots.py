"""Slots of a pool, their states, and the statistics of a pool.

Invariant: every slot is in exactly one state, and the slots that count never exceed ``max_size``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentkit.sandboxes.sandbox import Sandbox

SlotState = Literal["creating", "idle", "checking", "busy", "resetting", "degraded", "removing", "gone"]

_NEXT: Mapping[SlotState, frozenset[SlotState]] = {
    "creating": frozenset({"idle", "busy", "removing", "gone"}),
    "idle": frozenset({"busy", "checking", "degraded", "removing"}),
    "checking": frozenset({"idle", "degraded", "removing"}),
    "busy": frozenset({"idle", "resetting", "removing"}),
    "resetting": frozenset({"idle", "removing"}),
    "degraded": frozenset({"idle", "removing"}),
    "removing": frozenset({"gone"}),
    "gone": frozenset(),
}

COUNTED: frozenset[SlotState] = frozenset({"creating", "idle", "checking", "busy", "resetting", "degraded"})
"""States that count towards ``max_size``."""


class Slot:
    """One slot of a pool and its sandbox, from the decision to create it until it is removed."""

    def __init__(self, number: int, now: float, *, extra: bool = False) -> None:
        self.number = number
        """Its position in the order in which the slots of a pool were opened."""
        self.state: SlotState = "creating"
        self.sandbox: Sandbox | None = None
        self.opened = now
        self.since = now
        """Time of the last change of state; a health check does not count as one."""
        self.epoch = 0
        """Number of changes of state. A check result of an earlier epoch is void."""
        self.uses = 0
        self.extra = extra
        """Created beyond ``max_size``, for one use."""
        self.avoid_hosts: tuple[str, ...] = ()
        """Hosts on which its sandbox is created only if no other has room."""
        self.proven = False
        """It was used, or has lived long enough to show that creation works."""
        self.paused = False
        """The pool paused its sandbox, or is about to."""
        self.failure = ""
        """Why the sandbox must not be used again; empty if it may."""
        self.spare = False
        """Its caller keeps it ready and does not use it yet."""
        self.on_failure: list[Callable[[str], None]] = []
        self.unwatch: Callable[[], None] = lambda: None
        """Stops watching the state of the sandbox."""

    @property
    def box(self) -> Sandbox:
        assert self.sandbox is not None, f"a slot that is {self.state} has no sandbox"
        return self.sandbox

    def fail(self, reason: str) -> None:
        """Record the first failure and call ``on_failure``."""
        if not self.failure:
            self.failure = reason
            for callback in list(self.on_failure):
                callback(reason)


class Slots:
    """All slots of one pool.

    A change of state takes the same time in a small and in a large pool; only iteration visits all slots.
    """

    def __init__(self, max_size: int, clock: Callable[[], float]) -> None:
        self.max_size = max_size
        self.extra = 0
        """Number of slots beyond ``max_size``."""
        self._clock = clock
        self._slots: dict[Slot, None] = {}
        self._opened = 0
        self._by_id: dict[str, Slot] = {}
        self._idle: list[Slot] = []
        """Sorted by ``_position``."""
        self._counts: dict[SlotState, int] = dict.fromkeys(_NEXT, 0)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots))

    def count(self, *states: SlotState) -> int:
        """Return the number of slots in these states, without extra ones that are not being removed."""
        return sum(self._counts[state] for state in states)

    @property
    def size(self) -> int:
        return self.count(*COUNTED)

    @property
    def free(self) -> int:
        return self.max_size - self.size

    @property
    def available(self) -> int:
        """Number of slots that are idle, or will be without a release."""
        return self.count("idle", "checking", "creating", "resetting")

    def open(self, *, extra: bool = False) -> Slot:
        """Add a slot for a sandbox that is about to be created."""
        assert extra or self.free > 0, f"a pool of {self.max_size} is full"
        slot = Slot(self._opened, self._clock(), extra=extra)
        self._opened += 1
        self._slots[slot] = None
        self._add(slot, 1)
        return slot

    def fill(self, slot: Slot, sandbox: Sandbox) -> None:
        """Set the sandbox of a slot."""
        slot.sandbox = sandbox
        self._by_id[sandbox.id] = slot

    def find(self, id: str) -> Slot | None:
        """Return the slot of a sandbox."""
        return self._by_id.get(id)

    def move(self, slot: Slot, state: SlotState) -> None:
        """Change the state of a slot."""
        assert state in _NEXT[slot.state], f"a slot cannot change from {slot.state} to {state}"
        if slot.state == "idle":
            del self._idle[bisect.bisect_left(self._idle, _position(slot), key=_position)]
        if "checking" not in (slot.state, state):  # a checked sandbox keeps its position among idle ones
            slot.since = self._clock()
        self._add(slot, -1)
        slot.state = state
        slot.epoch += 1
        self._add(slot, 1)
        if state == "idle":
            bisect.insort(self._idle, slot, key=_position)
        if state == "gone":
            del self._slots[slot]
            if slot.sandbox is not None:
                del self._by_id[slot.sandbox.id]

    def idle(self) -> list[Slot]:
        """Return the idle slots, the one that has been idle longest first."""
        return list(self._idle)

    def longest_idle(self) -> Slot | None:
        """Return the slot that has been idle longest."""
        return self._idle[0] if self._idle else None

    def _add(self, slot: Slot, number: int) -> None:
        if slot.extra and slot.state in COUNTED:
            self.extra += number
        elif slot.state != "gone":
            self._counts[slot.state] += number


def _position(slot: Slot) -> tuple[float, int]:
    """Return the position of an idle slot: the one that has been idle longest comes first."""
    return slot.since, slot.number


@dataclass
class Counters:
    """Events of a pool since it started."""

    created: int = 0
    create_failures: int = 0
    acquired: int = 0
    hits: int = 0
    """Acquired without waiting for a creation."""
    released: int = 0
    exhausted: int = 0
    """Calls that raised ``PoolExhausted``."""
    rejected: int = 0
    """Sandboxes that failed the check before they were handed out."""
    reset: int = 0
    retired: dict[str, int] = field(default_factory=dict)
    """Sandboxes that were taken out of the pool, by reason."""
    left_behind: int = 0
    """Sandboxes that the engine did not remove in time; the reaper removes them."""


@dataclass(frozen=True)
class PoolStats:
    """State of a pool at one moment: ``idle + busy + creating + degraded == size <= max_size``."""

    size: int
    idle: int
    """Ready, or being checked."""
    busy: int
    creating: int
    """Being created or reset."""
    degraded: int
    """Set aside because they are slow."""
    removing: int
    extra: int
    """Beyond ``max_size``, with ``on_exhausted="create"``."""
    waiting: int
    """Callers that wait for a sandbox."""
    breaker: str
    failures: int
    """Failed creations in a row, including sandboxes that died right after their creation."""
    retry_after: float
    """Seconds until the next creation may start."""
    pressure: str | None
    """Why the host takes no more sandboxes."""
    counters: Counters
