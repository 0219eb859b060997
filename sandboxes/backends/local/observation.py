"""Observation of local sandboxes from outside, and the events between two observations.

Invariant: observing changes nothing and needs no connection to a sandbox; equal observations produce no event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentkit.sandboxes.backends.local.state import LocalState, all_states
from agentkit.sandboxes.types import BackendEvent, Observed

Observation = tuple[Observed, int]
"""A sandbox, and the number of its processes that the memory limit killed."""


def changes(before: Mapping[str, Observation], now: Mapping[str, Observation]) -> Iterator[BackendEvent]:
    """Yield the events between two observations."""
    for id, (observed, oom_kills) in now.items():
        earlier, earlier_oom_kills = before.get(id, (None, 0))
        was = "running" if earlier is None else earlier.state
        if oom_kills > earlier_oom_kills:
            yield BackendEvent(id, "oom")
        if observed.state == was:
            continue
        if observed.state == "exited":
            yield BackendEvent(id, "died", observed.exit_code)
        elif observed.state == "paused":
            yield BackendEvent(id, "paused")
        elif was == "paused":
            yield BackendEvent(id, "resumed")
    for id in before.keys() - now.keys():
        if before[id][0].state != "exited":
            yield BackendEvent(id, "died")
        yield BackendEvent(id, "removed")


def observe_all() -> dict[str, Observation]:
    """Observe all local sandboxes."""
    return {state.id: (observed(state), state.group.oom_kills() if state.group else 0) for state in all_states()}


def observed(state: LocalState) -> Observed:
    """Observe a sandbox through its state file and its processes."""
    phase = ("paused" if state.paused else "running") if state.runs or not state.processes else "exited"
    return Observed(
        id=state.id,
        state=phase,
        labels=state.labels,
        exit_code=state.exit_code,
        oom_killed=state.oom_killed,
        created=state.created,
        external=state.ended,
    )
