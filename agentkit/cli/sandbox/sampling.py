"""Samples of hosts and their sandboxes, for `agentkit sandbox top`.

Invariant: a sample takes bounded time and bounded work. At most ``CONCURRENCY`` sandboxes are asked at a time, one
question is in progress for each, and a sandbox that does not answer delays neither the others nor the sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentkit.cli.sandbox.listing import labels_of, owner_of
from agentkit.errors import AgentkitError, SandboxError
from agentkit.sandboxes.pool.health import HostUsage, local_host
from agentkit.sandboxes.reaper.sweep import Owned, owned
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.tasks import finished, loop_time, stopped, tracked

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend
    from agentkit.sandboxes.types import Stats

CONCURRENCY = 32
_LIST_SECONDS = 3.0
"""Time that an engine gets to list its sandboxes."""
_STATS_SECONDS = 5.0
"""Time that a sandbox gets to answer."""
_SILENT_SECONDS = 3.0
"""Time without an answer after which a running sandbox is shown as silent."""


@dataclass(frozen=True)
class HostRow:
    """One host. Shares are between 0 and 1; None: unknown."""

    host: str
    backend: str
    state: str
    cpu: float | None
    memory: float | None
    disk: float | None
    sandboxes: int
    limit: int | None
    """Largest number of sandboxes; None: no limit is known."""


@dataclass(frozen=True)
class SandboxRow:
    """One sandbox. None: unknown."""

    id: str
    backend: str
    host: str
    state: str
    owner: str
    age: float
    """Seconds since its creation."""
    cpu: float | None
    """Processors in use since the previous sample: 1.5 is one and a half."""
    memory: int | None
    """Bytes."""
    memory_limit: int | None
    processes: int | None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TenantRow:
    """What one tenant of a sandbox server uses; only the operator's token shows it."""

    host: str
    tenant: str
    sandboxes: int
    snapshots: int
    cpus: float
    """Limits of its sandboxes together, in processors."""
    memory: int
    """Limits of its sandboxes together, in bytes."""


@dataclass(frozen=True)
class Sample:
    """All hosts and sandboxes at one moment."""

    time: float
    """Seconds since the epoch."""
    hosts: list[HostRow]
    sandboxes: list[SandboxRow]
    problems: list[str]
    """One line for each back end that does not answer; its rows are those of the last answer."""
    tenants: list[TenantRow] = field(default_factory=list)


class Sampler:
    """Takes samples of some back ends. Close it; it leaves the back ends open.

    Args:
        backends: started back ends.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._found: dict[str, list[Owned]] = {}
        self._probes: dict[str, _Probe] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._tasks: set[asyncio.Task[None]] = set()

    async def sample(self, seconds: float) -> Sample:
        """Return a sample; wait up to ``seconds`` for sandboxes that have not answered, then show what is known."""
        listed, tenants = await asyncio.gather(
            asyncio.gather(*map(self._list, self._backends)), asyncio.gather(*map(_tenants, self._backends))
        )
        running = {
            each.id: backend
            for backend in self._backends
            for each in self._found.get(backend.name, ())
            if each.observed.state == "running"
        }
        for id in [id for id in self._probes if id not in running]:
            tracked(self._probes.pop(id).close(), self._tasks)
        asked: list[asyncio.Task[None]] = []
        for id, backend in running.items():
            probe = self._probes.setdefault(id, _Probe(id, backend))
            if not probe.busy:
                probe.busy = True
                asked.append(tracked(probe.ask(self._slots), self._tasks))
        if asked:
            await asyncio.wait(asked, timeout=seconds)
        rows = [self._row(backend, each) for backend in self._backends for each in self._found.get(backend.name, ())]
        problems = [text for text in listed if text]
        return Sample(time.time(), self._hosts(rows), rows, problems, [row for some in tenants for row in some])

    async def close(self) -> None:
        """End the connections to all sandboxes."""
        await stopped(set(self._tasks))
        await asyncio.gather(*(probe.close() for probe in self._probes.values()))

    async def _list(self, backend: Backend) -> str:
        """Find the sandboxes of a back end; return what is wrong with it."""
        try:
            self._found[backend.name] = await asyncio.wait_for(owned(backend), _LIST_SECONDS)
        except asyncio.TimeoutError:
            return f"{backend.name} did not list its sandboxes in {_LIST_SECONDS:g} s"
        except AgentkitError as error:
            return f"{backend.name}: {error}"
        return ""

    def _row(self, backend: Backend, each: Owned) -> SandboxRow:
        probe, observed = self._probes.get(each.id), each.observed
        stats = probe.stats if probe is not None else None
        silent = probe is not None and probe.silent
        return SandboxRow(
            id=each.id,
            backend=backend.name,
            host=backend.host_of(each.id),
            state="silent" if silent else observed.state,
            owner=owner_of(each),
            age=time.time() - (observed.created or time.time()),
            cpu=probe.cpu if probe is not None else None,
            memory=stats.memory if stats is not None else None,
            memory_limit=stats.memory_limit if stats is not None else None,
            processes=stats.processes if stats is not None else None,
            labels=labels_of(observed),
        )

    def _hosts(self, rows: Iterable[SandboxRow]) -> list[HostRow]:
        hosts: list[HostRow] = []
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.backend] = counts.get(row.backend, 0) + 1
        usage: HostUsage | None = None
        for backend in self._backends:
            if servers := backend.hosts():
                hosts += [
                    HostRow(one.host, backend.name, one.state, one.cpu, one.memory, one.disk, one.used, one.limit)
                    for one in servers
                ]
                continue
            usage = usage or local_host(backend.storage)  # once: its processors are measured since the previous call
            number, name = counts.get(backend.name, 0), socket.gethostname()
            hosts.append(HostRow(name, backend.name, "up", usage.cpu, usage.memory, usage.disk, number, None))
        return hosts


async def _tenants(backend: Backend) -> list[TenantRow]:
    """Return what the tenants of sandbox servers use; nothing for other back ends, and without the operator's token."""
    if not backend.hosts():  # imports nothing of servers where there are none
        return []
    from agentkit.sandboxes.backends.remote.backend import RemoteBackend

    if not isinstance(backend, RemoteBackend):
        return []
    try:
        answers = await asyncio.wait_for(backend.ask_all("GET", "/v1/status"), _LIST_SECONDS)
    except asyncio.TimeoutError:
        return []
    return [
        TenantRow(
            urlsplit(url).netloc,
            name,
            int(used["sandboxes"]),
            int(used["snapshots"]),
            used["cpus"],
            int(used["memory"]),
        )
        for url, answer in answers.items()
        if isinstance(answer, bytes)
        for name, used in json.loads(answer).get("tenants", {}).items()
    ]


class _Probe:
    """The connection to one sandbox, and its last answer.

    Attributes:
        busy: whether a question is in progress.
        stats: the last answer.
        cpu: processors that were in use between the last two answers.
    """

    def __init__(self, id: str, backend: Backend) -> None:
        self._id, self._backend = id, backend
        self._box: Sandbox | None = None
        self._since = self._answered = loop_time()
        self.busy = False
        self.stats: Stats | None = None
        self.cpu: float | None = None

    @property
    def silent(self) -> bool:
        return loop_time() - self._answered > _SILENT_SECONDS

    async def ask(self, slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                self._note(await asyncio.wait_for(self._ask(), _STATS_SECONDS))
        except (SandboxError, asyncio.TimeoutError):
            await self.close()  # the next question connects again
        finally:
            self.busy = False

    async def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            with contextlib.suppress(SandboxError):
                await finished(box.close())

    async def _ask(self) -> Stats:
        if self._box is None:
            self._box = await Sandbox.connect(self._id, backend=self._backend)
        return await self._box.stats()

    def _note(self, stats: Stats) -> None:
        now, before = loop_time(), self.stats
        if before is not None and before.cpu_seconds is not None and stats.cpu_seconds is not None:
            self.cpu = max(0.0, stats.cpu_seconds - before.cpu_seconds) / max(now - self._answered, 1e-3)
        self.stats, self._answered = stats, now
