"""Find and remove sandboxes whose owner has ended, or whose time to live has.

Invariant: a sandbox is removed only if all of its labels show that agentkit created it (one equal label is not enough)
and its owner is known to have ended, its owner's heartbeat is stale, or its time to live has ended. Sandboxes that
cannot be judged from this machine are kept. Removing is idempotent: two processes may sweep at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.reaper import heartbeat, records
from agentkit.sandboxes.reaper.heartbeat import HeartbeatState
from agentkit.sandboxes.reaper.labels import DISCARDED, HOST, ID, MANAGED, ORIGIN, OWNER, RUN, SERVER
from agentkit.sandboxes.reaper.owner import Owner, boot_id, host_id
from agentkit.sandboxes.types import Observed, Snapshot

LIST_TIMEOUT = 30.0
REMOVE_TIMEOUT = 60.0
ATTEMPTS = 3
CONCURRENCY = 4
"""Removals in flight: more would slow down the engine for its other users."""

Verdict = Literal["foreign", "keep", "orphan", "owner stopped renewing", "expired"]


@dataclass(frozen=True)
class Evidence:
    """What is known about a sandbox's owner."""

    alive: bool | None
    """Whether the owner's process runs; None if that cannot be seen from here."""
    heartbeat: HeartbeatState
    due: bool = False
    """The sandbox's time to live has ended."""
    rebooted: bool = False
    """The owner belonged to an earlier boot of this machine."""


@dataclass
class Report:
    """The result of one sweep."""

    removed: dict[str, str] = field(default_factory=dict)
    """Sandbox → reason."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sandbox or back end → error."""
    kept: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.removed |= other.removed
        self.failed |= other.failed
        self.kept += other.kept
        self.foreign += other.foreign


def owner_of(observed: Observed) -> Owner | None:
    """Return the owner that the labels of a sandbox name; None unless all of them are agentkit's."""
    labels = observed.labels
    if labels.get(MANAGED) != "1" or labels.get(ID) != observed.id:
        return None
    if not paths.is_id(observed.id) or not is_run(labels.get(RUN, "")):
        return None
    return Owner.parse(labels.get(OWNER, ""))


@dataclass(frozen=True)
class Owned:
    """A sandbox that agentkit created, of any owner."""

    observed: Observed
    owner: Owner
    run: str

    @property
    def id(self) -> str:
        return self.observed.id


async def owned(backend: Backend) -> list[Owned]:
    """Return all sandboxes of a back end that agentkit created. Raises the errors of ``Backend.list``."""
    found = await asyncio.wait_for(backend.list({MANAGED: "1"}), LIST_TIMEOUT)
    return [
        Owned(observed, owner, observed.labels[RUN]) for observed in found if (owner := owner_of(observed)) is not None
    ]


def is_run(text: str) -> bool:
    """Return whether ``text`` is the name of a heartbeat, and therefore safe as a file name."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def has_ended(alive: bool | None, heartbeat: HeartbeatState) -> bool:
    """Return whether an owner has certainly ended. The process is decisive: a lock may be inherited or lost."""
    return alive is False or (alive is None and heartbeat == "free")


def verdict(observed: Observed, evidence: Evidence) -> Verdict:
    """Decide about a sandbox that agentkit created."""
    if evidence.due:
        return "expired"
    if has_ended(evidence.alive, evidence.heartbeat):
        return "orphan"
    if evidence.heartbeat == "stale":
        return "owner stopped renewing"
    # No process survives a reboot; a sandbox that runs nevertheless belongs to another machine with this name.
    if evidence.rebooted and evidence.heartbeat == "absent" and observed.state in ("exited", "absent"):
        return "orphan"
    return "keep"


async def sweep(backend: Backend, *, run: str | None = None) -> Report:
    """Remove abandoned sandboxes and snapshots of ``backend``; with ``run``, only those of that owner.

    Failures of the engine are in the report, not raised.
    """
    report = Report()
    labels = {MANAGED: "1"} | ({RUN: run} if run else {})
    try:
        found = await asyncio.wait_for(backend.list(labels), LIST_TIMEOUT)
    except Exception as error:  # a third party's back end may raise any error
        report.failed[backend.name] = f"cannot be listed: {error or 'no answer in time'}"
        return report
    abandoned = {}
    for observed in found:
        decision = _judge(observed)
        if decision == "foreign":
            report.foreign.append(observed.id)
        elif decision == "keep":
            report.kept.append(observed.id)
        else:
            abandoned[observed.id] = decision
    await _sweep_snapshots(backend, run, found, report)
    seen = {observed.id for observed in found}
    abandoned |= {record.id: "left over" for record in records.all_of(run) if _left_over(record, backend, seen)}
    report.add(await remove_all(backend, abandoned))
    remove_free_heartbeats()
    return report


async def remove_all(backend: Backend, reasons: dict[str, str]) -> Report:
    """Remove sandboxes (id → reason), ``CONCURRENCY`` at a time, with retries."""
    report = Report()
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(id: str) -> None:
        async with limit:
            error = await _remove(backend, id)
        if error is None:
            records.forget(id)
            report.removed[id] = reasons[id]
        else:
            report.failed[id] = error

    await asyncio.gather(*(one(id) for id in reasons))
    return report


async def _sweep_snapshots(backend: Backend, run: str | None, sandboxes: Iterable[Observed], report: Report) -> None:
    """Discard the snapshots of ended owners, except those that existing sandboxes were created from."""
    try:
        snapshots = await asyncio.wait_for(backend.snapshots(), LIST_TIMEOUT)
        kept = [one for one in snapshots if _is_abandoned(one.labels, run)]
        if not kept:
            return
        # Sandboxes of all owners: another owner's may have been created from the snapshot.
        everyone = sandboxes if run is None else await asyncio.wait_for(backend.list({MANAGED: "1"}), LIST_TIMEOUT)
    except Exception as error:  # a third party's back end may raise any error
        report.failed[backend.name] = f"snapshots cannot be listed: {error or 'no answer in time'}"
        return
    used = {observed.labels.get(ORIGIN) for observed in everyone}
    for snapshot in kept:
        if snapshot.id in used:
            report.kept.append(snapshot.id)
            continue
        try:
            await asyncio.wait_for(backend.discard(Snapshot(snapshot.id, backend.name, "", None)), REMOVE_TIMEOUT)
        except Exception as error:
            report.failed[snapshot.id] = f"snapshot could not be discarded: {error or 'no answer in time'}"
        else:
            report.removed[snapshot.id] = "snapshot of an ended owner"


def _is_abandoned(labels: Mapping[str, str], run: str | None) -> bool:
    """Return whether the owner of a snapshot with these labels has ended."""
    if labels.get(DISCARDED) == "1":
        return True
    owner, name = Owner.parse(labels.get(OWNER, "")), labels.get(RUN, "")
    if owner is None or not is_run(name) or run not in (None, name):
        return False
    return verdict(Observed("", "exited", labels), _evidence(owner, labels)) != "keep"


def remove_free_heartbeats() -> None:
    """Delete the heartbeat files of owners that have ended and have no records left."""
    used = {record.run for record in records.all_of()}
    for path in paths.heartbeat_directory().iterdir():
        if is_run(path.name) and path.name not in used and heartbeat.state(path) == "free":
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _judge(observed: Observed) -> Verdict:
    owner = owner_of(observed)
    if owner is None:
        return "foreign"
    record = records.read(observed.id)
    decision = verdict(observed, _evidence(owner, observed.labels, due=record is not None and record.due))
    # The owner may have extended it meanwhile: `expire` and `extend` exclude each other.
    return "keep" if decision == "expired" and not records.expire(observed.id) else decision


def _evidence(owner: Owner, labels: Mapping[str, str], *, due: bool = False) -> Evidence:
    alive, state = _owner_state(owner, labels[RUN], labels.get(SERVER, ""))
    return Evidence(alive, state, due, rebooted=owner.boot != boot_id() and labels.get(HOST) == host_id())


def _owner_state(owner: Owner, run: str, server: str) -> tuple[bool | None, HeartbeatState]:
    """Return whether an owner's process runs, and the state of its heartbeat.

    A server may have a successor, which has another process and the same heartbeat: its heartbeat decides. If there is
    none where this user's server would have it, the first process decides.
    """
    state = heartbeat.state(paths.heartbeat_path(run))
    decides = not server or (state == "absent" and run == heartbeat.run_of(server))
    return owner.alive() if decides else None, state


def _left_over(record: records.Record, backend: Backend, seen: Iterable[str]) -> bool:
    """Return whether the record belongs to a sandbox that is not listed, because its owner was killed while it created
    the sandbox, or could not remove it."""
    if record.backend != backend.name or record.id in seen:
        return False
    if record.due:
        return True
    owner = Owner.parse(record.owner)
    return owner is not None and has_ended(*_owner_state(owner, record.run, record.server))


async def _remove(backend: Backend, id: str) -> str | None:
    """Remove a sandbox; return None, or the error."""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(0.5 * 2**attempt)
        try:
            await asyncio.wait_for(backend.remove(id), REMOVE_TIMEOUT)
        except Exception as error:
            problem = str(error) or "no answer in time"
        else:
            return None
    return f"could not be removed in {ATTEMPTS} attempts: {problem}"
