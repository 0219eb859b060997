"""The life of one sandbox as a small state machine: which state may follow which, why it did, and in which generation.

Invariant: the state is always one that a legal transition led to, and every transition is recorded with its cause and
both clocks. ``stopping`` can be entered from every state but ``removed``, so that nothing is ever beyond removal. The
generation counts starts: it grows when a sandbox starts and when it recovers, and whatever belongs to an earlier one is
lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from agentkit.errors import InvalidTransition
from agentkit.sandboxes.types import State, Transition

HISTORY = 100
"""Transitions kept; those between ``ready`` and ``busy`` are kept apart, so that work never pushes out a cause."""

_LIVE: frozenset[State] = frozenset({"degraded", "unhealthy", "recovering", "failed", "stopping"})
"""What may follow each state in which a sandbox exists."""

TRANSITIONS: Mapping[State, frozenset[State]] = {
    "pending": frozenset({"creating", "failed", "stopping"}),
    "creating": frozenset({"starting", "failed", "stopping"}),
    "starting": frozenset({"ready", "unhealthy", "failed", "stopping"}),
    "ready": _LIVE.union(("busy", "paused")),
    "busy": _LIVE.union(("ready",)),
    "paused": frozenset({"ready", "unhealthy", "recovering", "failed", "stopping"}),
    "degraded": frozenset({"ready", "unhealthy", "recovering", "failed", "stopping"}),
    "unhealthy": frozenset({"ready", "recovering", "failed", "stopping"}),
    "recovering": frozenset({"ready", "unhealthy", "failed", "stopping"}),
    "stopping": frozenset({"removed", "failed"}),
    "removed": frozenset(),
    "failed": frozenset({"stopping"}),
}
"""The legal transitions. ``degraded`` and ``unhealthy`` go back to ``ready`` when what was wrong has passed."""

WORKING: frozenset[State] = frozenset({"ready", "busy", "degraded"})
"""States in which a sandbox takes commands."""

_STARTS: frozenset[State] = frozenset({"starting", "recovering"})


class Lifecycle:
    """The state of one sandbox and how it got there."""

    def __init__(
        self, id: str, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._id = id
        self._monotonic = monotonic
        self._wall = wall
        self._causes: deque[tuple[int, Transition]] = deque(maxlen=HISTORY)
        self._work: deque[tuple[int, Transition]] = deque(maxlen=HISTORY)
        self._count = 0
        self._watchers: list[Callable[[Transition], None]] = []
        self.state: State = "pending"
        self.generation = 0

    @property
    def history(self) -> list[Transition]:
        """The last transitions, oldest first."""
        return [transition for _, transition in sorted([*self._causes, *self._work], key=lambda entry: entry[0])]

    def can(self, state: State) -> bool:
        """Whether ``state`` may follow the present one."""
        return state in TRANSITIONS[self.state]

    def to(self, state: State, cause: str) -> Transition:
        """Change the state. Raises ``InvalidTransition``, and then changes nothing."""
        if not self.can(state):
            possible = ", ".join(sorted(TRANSITIONS[self.state])) or "nothing"
            raise InvalidTransition(
                f"sandbox {self._id} is {self.state} and cannot become {state} ({cause}); it can become {possible}",
                state=self.state,
            )
        if state in _STARTS:
            self.generation += 1
        transition = Transition(self.state, state, cause, self.generation, self._wall(), self._monotonic())
        self.state = state
        kept = self._work if {transition.before, state} == {"ready", "busy"} else self._causes
        kept.append((self._count, transition))
        self._count += 1
        for watcher in list(self._watchers):
            watcher(transition)
        return transition

    def watch(self, watcher: Callable[[Transition], None]) -> Callable[[], None]:
        """Call ``watcher`` with every transition from now on; returns what ends it. It must not raise or block."""
        self._watchers.append(watcher)

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop
