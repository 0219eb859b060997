"""Metrics and events of the sandboxes of a run.

Invariant: everything that the pools and recoveries of this process report is counted once, in the metrics of one
training step. Events are bounded: what exceeds ``EVENTS_AT_ONCE`` and ``EVENTS_PER_S`` is counted instead of written.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkit.errors import RunDirectoryError
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.pool.health import HostUsage
from agentkit.sandboxes.recovery.record import Recovery, RecoveryLog
from agentkit.sandboxes.tasks import stopped

OnEvent = Callable[..., None]
"""Called with the kind of an event and its fields; raises ``RunDirectoryError`` if it cannot be written."""

EVENTS_AT_ONCE = 200
EVENTS_PER_S = 0.1
"""Events that are written in the long run: a day of a crash loop fills about 2 MB."""
STEPS_OF_HOST = 8
"""Fewer steps of environments say little about a host."""
_PERIOD = 1.0
"""Seconds between two looks at what was reported. Recoveries of one sandbox within this time are one event."""
_BACKLOG = 100_000
"""Records that wait to be counted."""
_PLANNED = frozenset({"closed", "discarded", "used", "old", "surplus", "caller left"})
"""Reasons for which a pool removes a sandbox that has not failed."""


@dataclass
class Tally:
    """What happened since the last training step."""

    created: int = 0
    create_failures: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the steps of environments by host."""

    def add(self, record: object) -> None:
        if isinstance(record, telemetry.Created):
            self.created += 1
        elif isinstance(record, telemetry.CreationFailed):
            self.create_failures += 1
        elif isinstance(record, telemetry.Retired):
            self.removed[name_of(record.reason)] += 1
        elif isinstance(record, telemetry.Stepped):
            self.steps.setdefault(record.host, []).append(record.seconds)
        elif isinstance(record, Recovery) and record.sandbox:
            self.recoveries.append(record)


def name_of(reason: str) -> str:
    """Return a reason as part of the name of a metric: ``canary_failed``; figures after a colon are dropped."""
    return re.sub(r"\W+", "_", reason.partition(":")[0]).strip("_")


def tally_metrics(tally: Tally) -> dict[str, float]:
    """Return the metrics of what happened in one training step."""
    seconds = [recovery.seconds for recovery in tally.recoveries]
    metrics: dict[str, float] = {
        "sandbox/created": tally.created,
        "sandbox/create_failures": tally.create_failures,
        "sandbox/removed": tally.removed.total(),
        "sandbox/recoveries": len(seconds),
        "sandbox/lost_s": sum(seconds),
    }
    metrics |= {f"sandbox/removed/{reason}": number for reason, number in tally.removed.items()}
    causes, means = Counter(one.cause for one in tally.recoveries), Counter(one.by for one in tally.recoveries)
    metrics |= {f"sandbox/recoveries/{name_of(cause)}": number for cause, number in causes.items()}
    metrics |= {f"sandbox/recovered_by/{name}": number for name, number in means.items()}
    if seconds:
        metrics |= {"sandbox/recovery_s_p50": statistics.median(seconds), "sandbox/recovery_s_max": max(seconds)}
    return metrics


def host_metrics(
    sandboxes: Mapping[str, int],
    up: Mapping[str, bool],
    recovered: Mapping[str, int],
    steps: Mapping[str, Sequence[float]],
    usage: Mapping[str, HostUsage],
) -> dict[str, float]:
    """Return the metrics of each host.

    Args:
        sandboxes: number of sandboxes of each host.
        up: whether each known server takes new sandboxes.
        recovered: number of recoveries of targets that were on each host.
        steps: seconds of each step of an environment there; their median is a metric from ``STEPS_OF_HOST`` steps on.
        usage: what of each host was in use, where it is known.
    """
    hosts = {*sandboxes, *up, *recovered, *steps, *usage}
    medians = {host: statistics.median(some) for host, some in steps.items() if len(some) >= STEPS_OF_HOST}
    used = {
        f"sandbox/host/{host}/{name}": float(getattr(usage[host], name))
        for host in sorted(usage)
        for name in ("cpu", "memory", "disk")
    }
    return (
        {f"sandbox/host/{host}/step_s": seconds for host, seconds in medians.items()}
        | used
        | {
            f"sandbox/host/{host}/{name}": float(value)
            for host in sorted(hosts)
            for name, value in (
                ("sandboxes", sandboxes.get(host, 0)),
                ("recoveries", recovered.get(host, 0)),
                ("up", up.get(host, True)),
            )
        }
    )


def incidents(records: Iterable[object]) -> list[tuple[str, dict[str, Any]]]:
    """Return the kind and the fields of the events that records stand for.

    A failed sandbox is one event. The recoveries of the environments in it, by one cause and in one way, are another:
    ``episodes`` is their number, ``seconds`` the longest time. So are those of environments without a sandbox.
    """
    events: list[tuple[str, dict[str, Any]]] = []
    recoveries: defaultdict[tuple[str, str, str, str], list[Recovery]] = defaultdict(list)
    for record in records:
        if isinstance(record, telemetry.Retired) and record.reason not in _PLANNED:
            lost = {"sandbox": record.sandbox, "host": record.host, "cause": record.reason, "in_use": record.in_use}
            events.append(("sandbox_lost", lost))
        elif isinstance(record, telemetry.CreationFailed):
            events.append(("sandbox_not_created", {"error": record.error}))
        elif isinstance(record, Recovery):
            recoveries[record.sandbox, record.host, record.cause, record.by].append(record)
    for (sandbox, host, cause, by), some in recoveries.items():
        fields = {"cause": cause, "by": by, "episodes": len(some), "seconds": round(max(r.seconds for r in some), 4)}
        if sandbox:
            events.append(("sandbox_recovered", {"sandbox": sandbox, "host": host, **fields}))
        else:
            events.append(("env_recovered", {**fields, "error": some[-1].error}))
    return events


class EventLimit:
    """Passes on events at a limited rate, and counts the others.

    Args:
        write: called with the kind and the fields of an event.
        at_once: number of events after a quiet time.
        per_s: number of events per second in the long run.
    """

    def __init__(self, write: OnEvent, at_once: int = EVENTS_AT_ONCE, per_s: float = EVENTS_PER_S) -> None:
        self._write, self._at_once, self._per_s = write, at_once, per_s
        self._room, self._last = float(at_once), 0.0
        self._omitted: Counter[str] = Counter()

    def add(self, kind: str, fields: Mapping[str, Any], now: float) -> None:
        """Write an event at time ``now``, in seconds of any clock, or count it."""
        self._room = min(self._at_once, self._room + (now - self._last) * self._per_s)
        self._last = now
        if self._room < 1:
            self._omitted[kind] += 1
            return
        self.flush()
        self._room -= 1
        self._write(kind, **fields)

    def flush(self) -> None:
        """Write the numbers of omitted events."""
        if self._omitted:
            self._write("sandbox_events_omitted", **self._omitted)
            self._omitted.clear()


class SandboxReport:
    """Metrics and events of all sandboxes of this process, from ``start`` to ``close``.

    Args:
        on_event: writes an event of the run.
        log: recoveries and hedged calls of the run's environments.
        spares: returns the number of environments that are ready to replace others.
    """

    def __init__(self, on_event: OnEvent, log: RecoveryLog, spares: Callable[[], int]) -> None:
        self._events = EventLimit(on_event)
        self._log, self._spares = log, spares
        self._reported: deque[object] = deque(maxlen=_BACKLOG)
        self._tally = Tally()
        self._hedged = self._won = 0
        self._host_states: dict[str, str] = {}
        self._listening = contextlib.ExitStack()
        self._task: asyncio.Task[None] | None = None
        self._concerned = False
        """Whether this run has had a sandbox."""

    def start(self) -> None:
        """Begin to listen."""
        self._listening.enter_context(telemetry.listening(self._reported.append))
        self._task = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """Write what was reported until now, and stop. Idempotent."""
        self._listening.close()
        if self._task is not None:
            await stopped([self._task])
            self._task = None
        with contextlib.suppress(RunDirectoryError):  # the run itself raises it
            self._digest()
            self._events.flush()

    def metrics(self) -> dict[str, float]:
        """Return the state of the sandboxes, and what happened since the last call; nothing in a run without any."""
        with contextlib.suppress(RunDirectoryError):
            self._digest()
        tally, self._tally = self._tally, Tally()
        pools = telemetry.open_pools()
        self._concerned = self._concerned or bool(pools) or tally != Tally()
        if not self._concerned:
            return {}
        before = self._hedged, self._won
        self._hedged, self._won = self._log.hedged.total(), self._log.won.total()
        recovered = Counter(recovery.host for recovery in tally.recoveries)
        up = {host: state == "up" for host, state in self._host_states.items()}
        sandboxes: Counter[str] = Counter()
        usage: dict[str, HostUsage] = {}
        for pool in pools:
            sandboxes.update(pool.hosts())
            usage.update(pool.usage())
        metrics = {
            **_states(pools),
            "sandbox/spares": self._spares(),
            "sandbox/standbys": self._log.standbys,
            **tally_metrics(tally),
            "sandbox/hedges": self._hedged - before[0],
            "sandbox/hedges_won": self._won - before[1],
            **host_metrics(sandboxes, up, recovered, tally.steps, usage),
        }
        return {name: float(value) for name, value in metrics.items()}

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD)
            with contextlib.suppress(RunDirectoryError):
                self._digest()

    def _digest(self) -> None:
        """Count what was reported, and write its events."""
        now = time.monotonic()
        records = [self._reported.popleft() for _ in range(len(self._reported))]
        for record in records:
            self._tally.add(record)
        for kind, fields in (*incidents(records), *self._changes_of_hosts()):
            self._events.add(kind, fields, now)

    def _changes_of_hosts(self) -> list[tuple[str, dict[str, Any]]]:
        changes = []
        for pool in telemetry.open_pools():
            for host in pool.servers():
                before = self._host_states.get(host.host, host.state)
                self._host_states[host.host] = host.state
                if host.state != before:
                    fields = {"host": host.host, "state": host.state, "before": before, "reason": host.reason}
                    changes.append(("sandbox_host", fields))
        return changes


def _states(pools: Sequence[telemetry.OpenPool]) -> dict[str, float]:
    stats = [pool.stats() for pool in pools]
    metrics: dict[str, float] = {
        f"sandbox/{state}": sum(getattr(one, state) for one in stats)
        for state in ("busy", "idle", "creating", "degraded")
    }
    return metrics | {"sandbox/breakers_open": sum(one.breaker != "closed" for one in stats)}
