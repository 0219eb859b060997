"""Decide when a sandbox is dead, slow or exhausted, and when the host is under pressure.

Invariant: pure functions; the time is an argument. A sandbox is slow only compared with its peers and for several
windows in a row, so that a busy host makes none slow. At most the share ``eject`` of all sandboxes, and always one, is
set aside at a time, so that a wrong decision never empties a pool.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from agentkit.errors import ConfigError
from agentkit.sandboxes.arguments import check_not_negative, check_positive
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Stats


@dataclass(frozen=True)
class HealthPolicy:
    """Intervals and thresholds of the health checks of a pool.

    Times are in seconds; shares are between 0 and 1. Raises ``ConfigError`` for a value that is out of range.

    Example:
        Detect a hung sandbox within 1.5 s instead of 4.7 s:

        ```python
        SandboxPool(spec, health=HealthPolicy(ping_interval=0.5, ping_timeout=0.5, ping_failures=2))
        ```
    """

    ping_interval: float = 2.0
    """Time between two pings of a sandbox."""
    ping_timeout: float = 0.9
    """Time without a sign of life after which a ping is missed. Not counted while this process itself is late."""
    ping_failures: int = 3
    """Missed pings in a row after which a sandbox is unhealthy."""
    canary_interval: float = 30.0
    """Time between two commands in an idle sandbox. A ping shows that the agent answers, a command that it works."""
    canary_timeout: float = 5.0
    """Time that such a command may take."""
    canary_failures: int = 2
    """Failed commands in a row after which an idle sandbox is replaced."""
    reconcile_interval: float = 15.0
    """Time between two comparisons with the engine's list of sandboxes, which find what a lost event hid."""
    slow_factor: float = 5.0
    """A sandbox is slow if its ping takes more than this many times the median of its peers ..."""
    slow_floor: float = 0.25
    """... and more than this."""
    slow_windows: int = 6
    """Rounds of pings in a row in which a sandbox must be slow to be set aside."""
    eject: float = 0.2
    """Largest share of the sandboxes that are set aside at one time."""
    probation: float = 30.0
    """Time for which a slow sandbox is set aside, times the number of times that it was."""
    watermark: float = 0.9
    """Share of the host's memory or disk in use from which nothing more is created."""
    exhausted: float = 0.95
    """Share of a sandbox's own memory, workspace or processes in use while idle from which it is replaced."""

    def __post_init__(self) -> None:
        check_positive(**{name: value for name, value in vars(self).items() if name != "eject"})
        check_not_negative(eject=self.eject)
        for name in ("eject", "watermark", "exhausted"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is a share, between 0 and 1")

    @property
    def watermarks(self) -> Mapping[str, float]:
        """The limits for ``pressure``. A busy processor delays sandboxes but breaks none, so it has no limit."""
        return {"memory": self.watermark, "disk": self.watermark}

    @property
    def detection(self) -> float:
        """Longest time in seconds until a hung sandbox is detected."""
        return self.ping_interval + self.ping_failures * self.ping_timeout


@dataclass(frozen=True)
class HostUsage:
    """Shares of a host's memory, disk and processors that are in use, between 0 and 1."""

    memory: float
    disk: float
    cpu: float = 0.0


def local_host(path: str = "/") -> HostUsage:
    """Measure this machine.

    Args:
        path: a path on the disk to measure.

    Returns:
        The memory that cannot be freed, the space of the disk that users cannot use, and the time of the processors
        since the previous call in this process.
    """
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(path)
    return HostUsage(
        memory=1 - memory.available / memory.total, disk=disk.percent / 100, cpu=psutil.cpu_percent() / 100
    )


def usage_of(backend: str | Backend) -> Callable[[], HostUsage] | None:
    """Return what measures the machine of a back end's sandboxes; None if that is not this machine."""
    name = backend if isinstance(backend, str) else backend.name
    return local_host if name in ("docker", "local") else None


def pressure(usage: HostUsage, watermarks: Mapping[str, float], *, already: bool) -> str | None:
    """Return why nothing more should be created, or None.

    Args:
        usage: the measured shares.
        watermarks: shares by field of ``HostUsage`` from which a host is under pressure.
        already: whether it is under pressure now, which ends 5 % below the watermark, but not below half of it.
    """
    for name, watermark in watermarks.items():
        share, end = getattr(usage, name), max(watermark - 0.05, watermark / 2)
        if share >= watermark:
            return f"{share:.0%} of the host's {name} is in use, the limit is {watermark:.0%}"
        if already and share >= end:
            text = f"{share:.0%} of the host's {name} is in use"
            return f"{text}; the limit of {watermark:.0%} was reached, and creations continue below {end:.0%}"
    return None


def exhausted(stats: Stats, spec: SandboxSpec, policy: HealthPolicy) -> str | None:
    """Return which resource an idle sandbox has used up, or None: no process in it will release it."""
    for name, used, limit in (
        ("memory", stats.memory, stats.memory_limit),
        ("workspace", stats.workspace_used, stats.workspace_size),
        ("pids", stats.processes, spec.resources.pids),
    ):
        if used is not None and limit and used >= policy.exhausted * limit:
            return f"{name}: {used} of {limit} in use while idle"
    return None


def slow_peers(latencies: Mapping[str, float], judges: Iterable[str], policy: HealthPolicy) -> set[str]:
    """Return the names that are slow compared with the median of the other ``judges``; none without peers."""
    judges = set(judges)
    ordered = sorted(latencies[name] for name in judges)
    slow = set()
    for name, latency in latencies.items():
        without = bisect.bisect_left(ordered, latency) if name in judges else None
        median = _median(ordered, without)
        if median is not None and latency > max(policy.slow_factor * median, policy.slow_floor):
            slow.add(name)
    return slow


def _median(ordered: Sequence[float], without: int | None) -> float | None:
    """Return the median of sorted values, without the one at position ``without``; None if none is left."""
    number = len(ordered) - (without is not None)
    if number == 0:
        return None

    def at(position: int) -> float:
        return ordered[position + (without is not None and position >= without)]

    return (at((number - 1) // 2) + at(number // 2)) / 2


@dataclass
class _Record:
    latency: float
    fresh: bool = True
    streak: int = 0
    ejections: int = 0
    until: float | None = None


@dataclass(frozen=True)
class SlowVerdict:
    id: str
    kind: Literal["eject", "restore", "replace"]
    reason: str


class SlownessTracker:
    """Latencies of sandboxes and who is set aside: ``observe`` each ping, ``judge`` once per round."""

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._records: dict[str, _Record] = {}

    def observe(self, id: str, latency: float) -> None:
        """Record the latency of a ping in seconds."""
        record = self._records.setdefault(id, _Record(latency))
        record.latency, record.fresh = latency, True

    def keep(self, ids: Container[str]) -> None:
        """Forget all other sandboxes."""
        self._records = {id: record for id, record in self._records.items() if id in ids}

    def ejected(self) -> list[str]:
        return [id for id, record in self._records.items() if record.until is not None]

    def judge(self, now: float) -> list[SlowVerdict]:
        """End a round of pings and return its verdicts, each once."""
        fresh = {id: record for id, record in self._records.items() if record.fresh}
        judges = [id for id, record in fresh.items() if record.until is None]
        slow = slow_peers({id: record.latency for id, record in fresh.items()}, judges, self._policy)
        verdicts = []
        for id, record in fresh.items():
            record.fresh = False
            if record.until is None:
                record.streak = record.streak + 1 if id in slow else 0
            elif now >= record.until:
                record.until, record.streak = None, 0
                kind, verb = ("replace", "still takes") if id in slow else ("restore", "now takes")
                verdicts.append(SlowVerdict(id, kind, f"a ping {verb} {record.latency:.3f} s"))
        late = [(record.latency, id) for id, record in fresh.items() if record.streak >= self._policy.slow_windows]
        room = max(1, int(self._policy.eject * len(self._records))) - len(self.ejected())
        for latency, id in sorted(late, reverse=True)[: max(0, room)]:
            record = self._records[id]
            record.ejections += 1
            record.until, record.streak = now + self._policy.probation * record.ejections, 0
            verdicts.append(SlowVerdict(id, "eject", f"a ping takes {latency:.3f} s, far more than its peers"))
        return verdicts
