"""State machine of one sandbox.

Invariant: the state changes only by legal transitions, and each is recorded with its cause and both clocks.
``stopping`` can follow every state except ``removed``, so that every sandbox can be removed. The generation counts
starts and recoveries; processes and connections of an earlier generation are lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from agentkit.errors import InvalidTransition
from agentkit.sandboxes.types import State, Transition

HISTORY = 100
"""Number of transitions kept. Those between ``ready`` and ``busy`` are kept separately, so that calls do not displace
causes."""

_LIVE: frozenset[State] = frozenset({"degraded", "unhealthy", "recovering", "failed", "stopping"})
"""States that can follow every state in which a sandbox exists."""

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
"""The legal transitions. ``degraded`` and ``unhealthy`` return to ``ready`` when the problem is over."""

WORKING: frozenset[State] = frozenset({"ready", "busy", "degraded"})
"""States in which a sandbox accepts commands."""

_STARTS: frozenset[State] = frozenset({"starting", "recovering"})


class Lifecycle:
    """The state of one sandbox and its history."""

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
        """Return whether ``state`` can follow the current state."""
        return state in TRANSITIONS[self.state]

    def to(self, state: State, cause: str) -> Transition:
        """Change the state. Raises ``InvalidTransition`` for an illegal transition, which changes nothing."""
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
        """Call ``watcher``, which must not raise or block, with each transition; return a function that stops it."""
        self._watchers.append(watcher)

        def stop() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return stop
