"""What can be seen of local sandboxes from outside, and what happened between two looks.

Invariant: looking changes nothing, and needs no connection to a sandbox; two equal looks bring no event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentkit.sandboxes.backends import local_state
from agentkit.sandboxes.backends.local_state import LocalState
from agentkit.sandboxes.types import BackendEvent, Observed

Sight = tuple[Observed, int]
"""A sandbox, and how many of its processes the memory limit killed."""


def changes(before: Mapping[str, Sight], now: Mapping[str, Sight]) -> Iterator[BackendEvent]:
    """What happened between two looks."""
    for id, (observed, ooms) in now.items():
        earlier, earlier_ooms = before.get(id, (None, 0))
        was = "running" if earlier is None else earlier.state
        if ooms > earlier_ooms:
            yield BackendEvent(id, "oom")
        if observed.state == was:
            continue
        if observed.state == "exited":
            yield BackendEvent(id, "died", observed.exit_code)
        elif observed.state == "paused":
            yield BackendEvent(id, "paused")
        elif was == "paused":
            yield BackendEvent(id, "resumed")
    for id, (observed, _) in before.items():
        if id not in now:
            if observed.state != "exited":
                yield BackendEvent(id, "died")
            yield BackendEvent(id, "removed")


def sights() -> dict[str, Sight]:
    """All local sandboxes as they are now."""
    return {
        state.id: (observed(state), state.group.oom_kills() if state.group is not None else 0)
        for state in local_state.all_states()
    }


def observed(state: LocalState) -> Observed:
    """What the state on disk and the processes say of a sandbox."""
    where = ("paused" if state.paused else "running") if state.runs or not state.processes else "exited"
    return Observed(
        id=state.id,
        state=where,
        labels=state.labels,
        exit_code=state.exit_code,
        oom_killed=state.oom_killed,
        created=state.created,
        external=state.ended,
    )
