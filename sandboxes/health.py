"""When a sandbox counts as dead, slow or exhausted, and when a host takes no more: decisions, no probes.

Invariant: pure; the time is an argument. Slow means slow among its peers, for several windows in a row, so that a busy
host condemns nobody; and at most ``eject`` of all sandboxes are set aside at once (one, if that is less than one), so
that a wrong judgement never empties a pool.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Stats


@dataclass(frozen=True)
class HealthPolicy:
    """How closely sandboxes are watched. Seconds, and shares between 0 and 1."""

    ping_interval: float = 2.0
    ping_timeout: float = 0.9
    """Without any sign of life after a ping that count as one miss; not if this process was late itself."""
    ping_failures: int = 3
    """Misses in a row that make a sandbox unhealthy."""
    canary_interval: float = 30.0
    """Between two commands run in an idle sandbox: a ping proves that the agent answers, work that it works."""
    canary_timeout: float = 5.0
    canary_failures: int = 2
    reconcile_interval: float = 15.0
    """Between two looks at what really exists, should an event have been missed."""
    slow_factor: float = 5.0
    """Slow is more than this many times the median of the peers' round trips …"""
    slow_floor: float = 0.25
    """… and never less than this."""
    slow_windows: int = 6
    eject: float = 0.2
    """Most of the sandboxes that are set aside for slowness at one time."""
    probation: float = 30.0
    """Set aside for this long, times the number of times that it was."""
    watermark: float = 0.9
    """Share of the host's memory or disk in use from which nothing more is created."""
    exhausted: float = 0.95
    """Share of a sandbox's own memory, workspace or processes in use from which it is replaced."""

    @property
    def detection(self) -> float:
        """Longest time until a hung sandbox counts as unhealthy."""
        return self.ping_interval + self.ping_failures * self.ping_timeout


@dataclass(frozen=True)
class HostUsage:
    """Shares in use."""

    memory: float
    disk: float


def local_host(path: str = "/") -> HostUsage:
    """What this machine uses now: memory that could not be freed, and the disk that holds ``path``."""
    memory, disk = psutil.virtual_memory(), shutil.disk_usage(path)
    return HostUsage(memory=1 - memory.available / memory.total, disk=disk.used / disk.total)


def pressure(usage: HostUsage, policy: HealthPolicy, *, already: bool) -> str | None:
    """Why nothing more should be created now, or None. Once under pressure, 5 % must become free to end it."""
    limit = policy.watermark - (0.05 if already else 0.0)
    for name, share in (("memory", usage.memory), ("disk", usage.disk)):
        if share >= limit:
            return f"{share:.0%} of the host's {name} is in use, the limit is {limit:.0%}"
    return None


def exhausted(stats: Stats, spec: SandboxSpec, policy: HealthPolicy) -> str | None:
    """Why a sandbox at rest is of no more use, or None: what it holds now, nobody will ever give back."""
    for name, used, limit in (
        ("memory", stats.memory, stats.memory_limit),
        ("workspace", stats.workspace_used, stats.workspace_size),
        ("pids", stats.processes, spec.resources.pids),
    ):
        if used is not None and limit and used >= policy.exhausted * limit:
            return f"{name}: {used} of {limit} in use while idle"
    return None


def slow_ones(latencies: Mapping[str, float], judges: Iterable[str], policy: HealthPolicy) -> set[str]:
    """Who is slow compared with the median of the others among ``judges``. Nobody is without a peer."""
    judges = set(judges)
    slow = set()
    for name, latency in latencies.items():
        peers = [latencies[peer] for peer in judges if peer != name]
        if peers and latency > max(policy.slow_factor * statistics.median(peers), policy.slow_floor):
            slow.add(name)
    return slow


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


class SlowPeers:
    """Remembers round trips and says who falls behind: ``observe`` each of them, ``judge`` once a window."""

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._records: dict[str, _Record] = {}

    def observe(self, id: str, latency: float) -> None:
        """A round trip in seconds; one that timed out took its timeout."""
        record = self._records.setdefault(id, _Record(latency))
        record.latency, record.fresh = latency, True

    def known(self) -> list[str]:
        return list(self._records)

    def forget(self, id: str) -> None:
        self._records.pop(id, None)

    def ejected(self) -> list[str]:
        return [id for id, record in self._records.items() if record.until is not None]

    def judge(self, now: float) -> list[SlowVerdict]:
        """Verdicts of this window, each given once."""
        latencies = {id: record.latency for id, record in self._records.items() if record.fresh}
        judges = [id for id in latencies if self._records[id].until is None]
        slow = slow_ones(latencies, judges, self._policy)
        verdicts = []
        for id, record in self._records.items():
            if record.until is not None:
                verdicts += self._end_probation(id, record, now, slow)
            elif record.fresh:
                record.streak = record.streak + 1 if id in slow else 0
            record.fresh = False
        verdicts += self._eject(latencies, now)
        return verdicts

    def _end_probation(self, id: str, record: _Record, now: float, slow: set[str]) -> list[SlowVerdict]:
        if record.until is None or now < record.until or not record.fresh:
            return []
        record.until, record.streak = None, 0
        if id in slow:
            return [SlowVerdict(id, "replace", f"still slow after probation: {record.latency:.3f} s a ping")]
        return [SlowVerdict(id, "restore", f"answers in {record.latency:.3f} s again")]

    def _eject(self, latencies: Mapping[str, float], now: float) -> list[SlowVerdict]:
        room = max(1, int(self._policy.eject * len(self._records))) - len(self.ejected())
        late = [id for id in latencies if self._records[id].streak >= self._policy.slow_windows]
        verdicts = []
        for id in sorted(late, key=lambda id: latencies[id], reverse=True)[: max(0, room)]:
            record = self._records[id]
            record.ejections += 1
            record.until, record.streak = now + self._policy.probation * record.ejections, 0
            verdicts.append(SlowVerdict(id, "eject", f"{record.latency:.3f} s a ping, far more than its peers"))
        return verdicts
