"""Find and remove sandboxes that nobody owns any more, or whose time has ended.

Invariant: only what certainly is abandoned is removed. A sandbox counts as ours by all of its marks together (a label
that happens to be equal is not enough), and as abandoned only if its owner is known to have ended, its lease has run
out, or its time has. Whatever cannot be judged from here stays. Sweeping twice, or by two processes at once, does no
harm: removing is idempotent.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentkit.sandboxes import lease as leases
from agentkit.sandboxes import paths, records
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.claims import ORIGIN
from agentkit.sandboxes.lease import LeaseState
from agentkit.sandboxes.owner import Owner, boot_id, host_id
from agentkit.sandboxes.types import Observed, Snapshot

LIST_TIMEOUT = 30.0
REMOVE_TIMEOUT = 60.0
ATTEMPTS = 3
DISCARDED = "agentkit.discarded"
"""Label of a snapshot that its owner discarded while a sandbox that was made from it ran."""
AT_ONCE = 4
"""Removals in flight: enough to keep an engine busy, too few to starve it."""

Verdict = Literal["foreign", "keep", "orphan", "lease ran out", "expired"]


@dataclass(frozen=True)
class Evidence:
    """What is known of a sandbox's owner."""

    alive: bool | None
    """Whether the owner's process runs; None if that cannot be seen from here."""
    lease: LeaseState
    due: bool = False
    """The sandbox's time to live has ended."""
    rebooted: bool = False
    """The owner belonged to an earlier boot of this very machine."""


@dataclass
class Report:
    """What one sweep did."""

    removed: dict[str, str] = field(default_factory=dict)
    """Sandbox → why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sandbox, or back end, → what went wrong."""
    kept: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.removed |= other.removed
        self.failed |= other.failed
        self.kept += other.kept
        self.foreign += other.foreign


def owner_of(observed: Observed) -> Owner | None:
    """The owner that a sandbox's marks name; None unless all of them are what agentkit writes."""
    labels = observed.labels
    if labels.get(leases.MANAGED) != "1" or labels.get(leases.ID) != observed.id:
        return None
    if not paths.is_id(observed.id) or not is_run(labels.get(leases.RUN, "")):
        return None
    return Owner.parse(labels.get(leases.OWNER, ""))


@dataclass(frozen=True)
class Owned:
    """A sandbox that is ours by its marks, whoever of us owns it."""

    observed: Observed
    owner: Owner
    run: str

    @property
    def id(self) -> str:
        return self.observed.id


async def owned(backend: Backend) -> list[Owned]:
    """All sandboxes of a back end that agentkit made. Raises what ``list`` raises."""
    found = await asyncio.wait_for(backend.list({leases.MANAGED: "1"}), LIST_TIMEOUT)
    return [
        Owned(observed, owner, observed.labels[leases.RUN])
        for observed in found
        if (owner := owner_of(observed)) is not None
    ]


def is_run(text: str) -> bool:
    """Whether ``text`` is the name of a lease, and so safe as the name of a file."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def has_ended(alive: bool | None, lease: LeaseState) -> bool:
    """Whether an owner has certainly ended. Its own process tells best; a lock may have been inherited, or lost."""
    return alive is False or (alive is None and lease == "free")


def verdict(observed: Observed, evidence: Evidence) -> Verdict:
    """What is to happen to a sandbox that is ours by its marks."""
    if evidence.due:
        return "expired"
    if has_ended(evidence.alive, evidence.lease):
        return "orphan"
    if evidence.lease == "stale":
        return "lease ran out"
    # No process is left of an earlier boot; a sandbox that runs all the same belongs to another machine of this name.
    if evidence.rebooted and evidence.lease == "absent" and observed.state in ("exited", "absent"):
        return "orphan"
    return "keep"


async def sweep(backend: Backend, *, run: str | None = None) -> Report:
    """Remove from ``backend`` what is abandoned; with ``run``, only sandboxes of that lease.

    Never raises for a sandbox or an engine that fails: the report says so.
    """
    report = Report()
    labels = {leases.MANAGED: "1"} | ({leases.RUN: run} if run else {})
    try:
        found = await asyncio.wait_for(backend.list(labels), LIST_TIMEOUT)
    except Exception as error:  # a third party's back end may raise any error
        report.failed[backend.name] = f"cannot be listed: {error or 'no answer in time'}"
        return report
    condemned = {}
    for observed in found:
        decision = _judge(observed)
        if decision == "foreign":
            report.foreign.append(observed.id)
        elif decision == "keep":
            report.kept.append(observed.id)
        else:
            condemned[observed.id] = decision
    await _sweep_snapshots(backend, run, found, report)
    seen = {observed.id for observed in found}
    condemned |= {record.id: "left over" for record in records.all_of(run) if _left_over(record, backend, seen)}
    report.add(await remove_all(backend, condemned))
    forget_leases()
    return report


async def remove_all(backend: Backend, reasons: dict[str, str]) -> Report:
    """Remove sandboxes, a few at a time, each with retries."""
    report = Report()
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(id: str) -> None:
        async with gate:
            error = await _remove(backend, id)
        if error is None:
            records.forget(id)
            report.removed[id] = reasons[id]
        else:
            report.failed[id] = error

    await asyncio.gather(*(one(id) for id in reasons))
    return report


async def _sweep_snapshots(backend: Backend, run: str | None, sandboxes: Iterable[Observed], report: Report) -> None:
    """Discard the snapshots of dead owners, unless a sandbox that was made from one of them is still there."""
    try:
        snapshots = await asyncio.wait_for(backend.snapshots(), LIST_TIMEOUT)
        kept = [one for one in snapshots if _is_abandoned(one.labels, run)]
        if not kept:
            return
        # All sandboxes, not only those of one lease: another owner's may have been made from it.
        everyone = (
            sandboxes if run is None else await asyncio.wait_for(backend.list({leases.MANAGED: "1"}), LIST_TIMEOUT)
        )
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
            report.removed[snapshot.id] = "snapshot of a dead owner"


def _is_abandoned(labels: Mapping[str, str], run: str | None) -> bool:
    """Whether the owner of a snapshot with these labels has ended."""
    if labels.get(DISCARDED) == "1":
        return True
    owner, lease = Owner.parse(labels.get(leases.OWNER, "")), labels.get(leases.RUN, "")
    if owner is None or not is_run(lease) or run not in (None, lease):
        return False
    state = leases.state(paths.lease_path(lease))
    rebooted = owner.boot != boot_id() and labels.get(leases.HOST) == host_id()
    return verdict(Observed("", "exited", labels), Evidence(owner.alive(), state, rebooted=rebooted)) != "keep"


def forget_leases() -> None:
    """Remove the lease files of owners that have ended and of whose sandboxes no record is left."""
    used = {record.run for record in records.all_of()}
    for path in paths.lease_directory().iterdir():
        if is_run(path.name) and path.name not in used and leases.state(path) == "free":
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _judge(observed: Observed) -> Verdict:
    owner = owner_of(observed)
    if owner is None:
        return "foreign"
    record = records.read(observed.id)
    evidence = Evidence(
        alive=owner.alive(),
        lease=leases.state(paths.lease_path(observed.labels[leases.RUN])),
        due=record is not None and record.due,
        rebooted=owner.boot != boot_id() and observed.labels.get(leases.HOST) == host_id(),
    )
    decision = verdict(observed, evidence)
    # The owner may have extended it since: `expire` and `extend` exclude each other.
    return "keep" if decision == "expired" and not records.expire(observed.id) else decision


def _left_over(record: records.Record, backend: Backend, seen: Iterable[str]) -> bool:
    """Whether a record is all, or nearly all, that is left of a sandbox: its owner was killed while it made it, or
    could not remove it."""
    if record.backend != backend.name or record.id in seen:
        return False
    if record.due:
        return True
    owner = Owner.parse(record.owner)
    return owner is not None and has_ended(owner.alive(), leases.state(paths.lease_path(record.run)))


async def _remove(backend: Backend, id: str) -> str | None:
    """None, or why it could not be removed."""
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
