"""Records of a sandbox server, which `agentkit dashboard` shows.

Invariant: recording never fails a request: a write error is logged once, and the server goes on. The files are bounded:
beyond ``MOST`` lines, the older half is removed. Only one process at a time writes to a folder.

Layout::

    config.yaml       name of the back end, and the address: ``sandbox_server: {backend: …, url: …}``
    events.jsonl      what happened to sandboxes, and to the machine
    metrics.jsonl     numbers of sandboxes, and the use of the machine, every ``METRICS_S`` seconds
    sandboxes.json    the present sandboxes, replaced every ``SAMPLE_S`` seconds, and soon after something happened
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import yaml

from agentkit.atomic_file import write_atomically
from agentkit.errors import ConfigError, SandboxError
from agentkit.jsonl import JsonlWriter, read_jsonl
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.server.sessions import SandboxSession
from agentkit.sandboxes.server.tenants import Tenants
from agentkit.sandboxes.tasks import stopped

_log = logging.getLogger(__name__)

SAMPLE_S = 5.0
_SOON_S = 1.0
METRICS_S = 30.0
MOST = 40_000
"""Lines of a file: at least a week of metrics."""
_ENGINE_S = 3.0
"""Time that the engine gets to list its sandboxes."""
_STATS_S = 2.0
"""Time that a sandbox gets to tell what it uses."""
_ASKED = 32
"""Sandboxes that are asked at a time."""
_KIND = "sandbox_server"
_INCIDENTS = ("oom", "timeout", "taint", "died", "paused", "resumed", "adopted")


class ServerRecords:
    """Records a sandbox server of this process while the block runs: ``async with ServerRecords(…)``.

    Args:
        folder: a new folder, or one with earlier records of a server, which are continued.
        url: the address of the server.
        backend: where its sandboxes are.
        tenants: its tenants.
        sample_s: seconds between two looks at the sandboxes.

    Raises:
        ConfigError: the folder contains something else, is in use, or cannot be written.
    """

    def __init__(
        self, folder: Path, url: str, backend: Backend, tenants: Tenants, *, sample_s: float = SAMPLE_S
    ) -> None:
        self._folder, self._backend, self._tenants, self._sample_s = folder, backend, tenants, sample_s
        self._host = urlsplit(url).netloc
        try:
            self._lock = _claimed(folder)
            about = {_KIND: {"backend": backend.name, "url": url}}
            write_atomically(folder / "config.yaml", yaml.safe_dump(about), durable=True)
            self._events, self._metrics = (_Lines(folder / f"{name}.jsonl") for name in ("events", "metrics"))
        except OSError as error:
            raise ConfigError(f"--records {folder} cannot be written: {error.strerror}; choose another") from None
        self._began = self._metrics.first_time or time.time()
        self._tally: Counter[str] = Counter()
        self._reason = ""
        self._cpu: dict[str, tuple[float, float]] = {}
        """When each sandbox was measured last, and the seconds that it had computed."""
        self._measured_at = float("-inf")
        self._happened = asyncio.Event()
        self._failed = False
        self._running = contextlib.ExitStack()

    async def __aenter__(self) -> ServerRecords:
        self._event("start", resume=self._metrics.first_time is not None, step=0)
        self._running.enter_context(telemetry.listening(self._heard))
        self._following = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        await stopped([self._following])
        self._running.close()
        await self._look(metrics=True)
        self._event("end", finished=True)
        self._lock.close()

    def _heard(self, record: object) -> None:
        """Write what happened to a sandbox."""
        if not isinstance(record, telemetry.Served):
            return
        self._happened.set()
        place = {"sandbox": record.sandbox, "host": self._host, "tenant": record.tenant}
        match record.what:
            case "created":
                self._tally["created"] += 1
                self._event("sandbox_created", **place, seconds=record.seconds)
            case "not created":
                self._tally["create_failures"] += 1
                self._event("sandbox_not_created", host=self._host, error=record.cause, tenant=record.tenant)
            case "lost":
                self._event("sandbox_lost", **place, cause=record.cause)
            case "restarted":
                self._tally["recoveries"] += 1
                seconds = round(record.seconds or 0.0, 4)
                self._event("sandbox_recovered", **place, cause=record.cause, by="restart", episodes=1, seconds=seconds)
            case "removed":
                self._tally["removed"] += 1
                self._event("sandbox_removed", **place, cause=record.cause)
            case what if what in _INCIDENTS:
                self._tally[what] += 1
                self._event("sandbox_incident", **place, what=what, cause=record.cause)

    async def _follow(self) -> None:
        while True:
            self._happened.clear()
            await self._look(metrics=time.monotonic() >= self._measured_at + METRICS_S)
            await asyncio.sleep(min(_SOON_S, self._sample_s))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._happened.wait(), max(self._sample_s - _SOON_S, 0.01))

    async def _look(self, *, metrics: bool) -> None:
        """Write the present sandboxes, a change of the machine and, if wanted, metrics."""
        reason = self._tenants.host.reason
        if reason != self._reason:
            before, state = ("unschedulable" if one else "up" for one in (self._reason, reason))
            self._event("sandbox_host", host=self._host, before=before, state=state, reason=reason)
            self._reason = reason
        rows = await self._present()
        states = Counter(row["state"] for row in rows)
        if metrics:
            self._measured_at = time.monotonic()
            self._write(self._metrics, self._line(states, len(rows)))
            self._tally.clear()
        present = {"time": time.time(), "sandboxes": rows, "metrics": self._line(states, len(rows))}
        try:
            await asyncio.to_thread(write_atomically, self._folder / "sandboxes.json", json.dumps(present))
        except OSError as error:
            self._complain(error)

    def _line(self, states: Mapping[str, int], number: int) -> dict[str, Any]:
        now = time.time()
        usage = {f"sandbox/host/{self._host}/{name}": share for name, share in vars(self._tenants.host.usage).items()}
        counted = ("created", "create_failures", "removed", "recoveries", *_INCIDENTS)
        return {
            "step": round(now - self._began),
            "time": now,
            **{f"sandbox/{state}": states.get(state, 0) for state in ("running", "paused", "creating", "exited")},
            **{f"sandbox/{name}": self._tally[name] for name in counted},
            f"sandbox/host/{self._host}/sandboxes": number,
            f"sandbox/host/{self._host}/up": float(not self._reason),
            **usage,
        }

    async def _present(self) -> list[dict[str, Any]]:
        boxes = [
            (tenant, session, channel)
            for tenant, sessions in self._tenants.sessions().items()
            for session, channel in sessions.boxes()
        ]
        seen = await self._states() if boxes else {}
        slots = asyncio.Semaphore(_ASKED)
        self._cpu = {session.id: self._cpu[session.id] for _, session, _ in boxes if session.id in self._cpu}

        async def row(tenant: str, session: SandboxSession, channel: Channel | None) -> dict[str, Any]:
            state, created = seen.get(session.id, ("unknown", None))
            async with slots:
                used = await self._used(session.id, channel if state == "running" else None)
            place = {"sandbox": session.id, "host": self._host, "tenant": tenant, "created": created}
            return place | {"state": state if session.key else "creating"} | used

        return await asyncio.gather(*(row(*box) for box in boxes))

    async def _states(self) -> dict[str, tuple[str, float | None]]:
        """Return state and time of creation of each sandbox; nothing if the engine does not answer."""
        try:
            found = await asyncio.wait_for(self._backend.list({}), _ENGINE_S)
        except (SandboxError, asyncio.TimeoutError):
            return {}
        return {observed.id: (observed.state, observed.created) for observed in found}

    async def _used(self, id: str, channel: Channel | None) -> dict[str, Any]:
        """Return what a sandbox uses; None where it is unknown."""
        unknown: dict[str, Any] = dict.fromkeys(("cpu", "memory", "memory_limit", "processes"))
        if channel is None:
            return unknown
        try:
            stats = await asyncio.wait_for(channel.stats(), _STATS_S)
        except (SandboxError, asyncio.TimeoutError):
            return unknown
        cpu, now = None, time.monotonic()
        if stats.cpu_seconds is not None:
            then, before = self._cpu.get(id, (now, stats.cpu_seconds))
            if now > then and stats.cpu_seconds >= before:  # a restart begins at 0
                cpu = (stats.cpu_seconds - before) / (now - then)
            self._cpu[id] = now, stats.cpu_seconds
        return {"cpu": cpu, "memory": stats.memory, "memory_limit": stats.memory_limit, "processes": stats.processes}

    def _event(self, kind: str, **fields: Any) -> None:
        self._write(self._events, {"event": kind, "time": time.time(), **fields})

    def _write(self, lines: _Lines, record: Mapping[str, Any]) -> None:
        try:
            lines.add(record)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            _log.error("%s cannot be written, so sandboxes are not recorded completely: %s", self._folder, error)
        self._failed = True


class _Lines:
    """A file of lines whose older half is removed beyond ``MOST`` lines. ``first_time``: time of the first one."""

    def __init__(self, file: Path) -> None:
        self._writer = JsonlWriter(file)
        self._times = [line["time"] for line in read_jsonl(file)]
        self.first_time = self._times[0] if self._times else None

    def add(self, record: Mapping[str, Any]) -> None:
        self._writer.write(record)
        self._times.append(record["time"])
        if len(self._times) > MOST:
            self._times = self._times[MOST // 2 :]
            self._writer.keep(lambda line: line["time"] >= self._times[0])


def _claimed(folder: Path) -> IO[str]:
    """Create a folder, and return its lock, which the kernel releases when the process ends. Raises ``ConfigError``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.yaml"
    if any(folder.iterdir()) and not (config.is_file() and config.read_text("utf-8").startswith(f"{_KIND}:")):
        raise ConfigError(f"--records {folder} contains other files than records of a server; choose a new folder")
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"another server records into {folder}; choose another folder") from None
    return lock
