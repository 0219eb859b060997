"""Watches the sandboxes of a pool: pings, real work on idle ones, the engine's events, and what really exists.

Invariant: it only probes and reports; what follows is its ward's decision. Every probe has a timeout and none waits for
another; a verdict names the state of the sandbox (``epoch``) that it was reached in. An event may be lost, doubled or
late: it is a reason to look, and the reconciliation looks anyway.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentkit.errors import SandboxError
from agentkit.sandboxes.aio import stopped
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.care import LOOK_TIMEOUT, Care
from agentkit.sandboxes.health import HealthPolicy, HostUsage, SlowPeers, pressure
from agentkit.sandboxes.ledger import Place
from agentkit.sandboxes.types import Observed

_PINGED = frozenset({"idle", "busy", "degraded"})
_EXPECTED = frozenset({"idle", "checking", "busy", "degraded"})
"""States in which a sandbox is to be seen by the engine."""


class Ward(Protocol):
    """Whose sandboxes are watched, and who decides."""

    def places(self) -> Iterable[Place]: ...

    def lost(self, place: Place, reason: str) -> None: ...

    def condemn(self, place: Place, epoch: int, reason: str) -> None: ...

    def eject(self, place: Place, epoch: int, reason: str) -> None: ...

    def restore(self, place: Place, reason: str) -> None: ...

    def begin_check(self, place: Place) -> bool: ...

    def end_check(self, place: Place, epoch: int, reason: str) -> None: ...

    def press(self, reason: str | None) -> None: ...

    def wake(self) -> None: ...


@dataclass(frozen=True)
class Findings:
    """What a look at the engine says about the sandboxes that should be there."""

    lost: dict[str, str]
    """Sandboxes that are not there or do not run, and why."""
    frozen: set[str]
    """Paused, though nobody should have."""
    strays: set[str]
    """There, but nobody's."""


def compare(observed: Iterable[Observed], expected: Iterable[str], owned: Iterable[str]) -> Findings:
    """``expected`` should be there, and should have been before the look began; ``owned`` are all that are somebody's,
    those that come and go among them."""
    seen = {one.id: one for one in observed}
    expected = set(expected)
    lost = dict.fromkeys(expected - set(seen), "removed")
    lost |= {id: "exited" for id in expected & set(seen) if seen[id].state in ("exited", "absent")}
    frozen = {id for id in expected & set(seen) if seen[id].state == "paused"}
    return Findings(lost, frozen, set(seen) - set(owned))


class Monitor:
    """Runs the probes of ``HealthPolicy`` until it is stopped."""

    def __init__(
        self, ward: Ward, care: Care, policy: HealthPolicy, rng: random.Random, host: Callable[[], HostUsage] | None
    ) -> None:
        self._ward, self._care, self._policy, self._rng, self._host = ward, care, policy, rng, host
        self._slow = SlowPeers(policy)
        self._pinged: set[Place] = set()
        """Those whose answer is awaited."""
        self._next_canary: dict[Place, float] = {}
        self._strays: dict[str, float] = {}
        self._pressed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._backoff = Backoff(cap=5.0)

    def start(self) -> None:
        for work in (self._ping_all(), self._check_some(), self._listen(), self._reconcile_now_and_then()):
            self._begin(work)

    async def stop(self) -> None:
        """Returns when nothing runs any more."""
        while self._tasks:  # the last of them may begin others
            await stopped(set(self._tasks))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Pings.

    async def _ping_all(self) -> None:
        now = asyncio.get_running_loop().time
        due = now()
        while True:
            # By the clock, not after the last round: those that hang must not slow down their own discovery.
            due = max(due + self._policy.ping_interval, now())
            await asyncio.sleep(due - now())
            self._measure_host()
            places = [place for place in self._ward.places() if place.state in _PINGED and not place.paused]
            pings = [self._begin(self._ping(place)) for place in places if place not in self._pinged]
            if pings:
                await asyncio.wait(pings, timeout=self._policy.ping_timeout)
            self._judge_slow(places)
            self._ward.wake()

    async def _ping(self, place: Place) -> None:
        epoch, generation = place.epoch, place.box.generation
        self._pinged.add(place)
        try:
            latency = await self._care.pulse(place.box)
        except SandboxError:
            return  # lost: the connection itself says so, at once. Paused by its user, or being restarted: no news.
        finally:
            self._pinged.discard(place)
        if latency is None:
            self._ward.condemn(place, epoch, "hung")
        elif place.box.generation == generation:
            self._slow.observe(place.box.id, latency)

    def _judge_slow(self, pinged: Iterable[Place]) -> None:
        places = {place.box.id: place for place in self._ward.places() if place.sandbox is not None}
        for id in set(self._slow.known()) - set(places):
            self._slow.forget(id)
        epochs = {place.box.id: place.epoch for place in pinged}
        for verdict in self._slow.judge(asyncio.get_running_loop().time()):
            place = places.get(verdict.id)
            if place is None:
                continue
            if verdict.kind == "restore":
                self._ward.restore(place, verdict.reason)
            elif verdict.kind == "eject":
                self._ward.eject(place, epochs.get(verdict.id, -1), verdict.reason)
            else:
                self._ward.condemn(place, place.epoch, "slow")

    def _measure_host(self) -> None:
        if self._host is not None:
            reason = pressure(self._host(), self._policy, already=self._pressed)
            self._pressed = reason is not None
            self._ward.press(reason)

    # Real work on idle ones.

    async def _check_some(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = asyncio.get_running_loop().time()
            places = [place for place in self._ward.places() if place.sandbox is not None]
            self._next_canary = {place: due for place, due in self._next_canary.items() if place in set(places)}
            under_way = sum(place.state == "checking" for place in places)
            for place in places:
                # Spread over the interval, and never so many that nobody could be served meanwhile.
                due = self._next_canary.setdefault(
                    place, now + self._policy.canary_interval * self._rng.uniform(0.5, 1)
                )
                if now >= due and under_way < max(1, len(places) // 4) and self._ward.begin_check(place):
                    self._next_canary[place] = now + self._policy.canary_interval
                    under_way += 1
                    self._begin(self._check(place, place.epoch))

    async def _check(self, place: Place, epoch: int) -> None:
        reason = ""
        try:
            for _ in range(self._policy.canary_failures):
                reason = await self._care.check(place)
                if not reason or place.epoch != epoch:
                    break
        finally:
            self._ward.end_check(place, epoch, reason)

    # The engine.

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async for event in self._care.backend.events():
                    failures = 0
                    place = self._find(event.id)
                    if place is not None and event.kind in ("died", "removed", "paused"):
                        self._begin(self._look_at(place, place.epoch))
            except SandboxError:
                pass  # the engine is away: the reconciliation below finds out what has become of the sandboxes
            failures += 1
            await asyncio.sleep(self._backoff.delay(failures, self._rng))
            await self._reconcile()

    async def _look_at(self, place: Place, epoch: int) -> None:
        """An event is about it: see what is true now. Events come late, and twice."""
        began = self._now()
        try:
            observed = await asyncio.wait_for(self._care.backend.inspect(place.box.id), LOOK_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            return
        self._act(compare([observed], [observed.id], [observed.id]), {observed.id: (place, epoch)}, began)

    async def _reconcile_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._policy.reconcile_interval)
            await self._reconcile()

    async def _reconcile(self) -> None:
        """What was there before the look began must be there; what nobody ever knew of must not."""
        expected = {place.box.id: (place, place.epoch) for place in self._ward.places() if place.state in _EXPECTED}
        began = self._now()
        try:
            observed = await asyncio.wait_for(self._care.observe(), LOOK_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            return
        owned = {place.box.id for place in self._ward.places() if place.sandbox is not None}
        findings = compare(observed, expected, owned)
        self._act(findings, expected, began)
        self._remove_strays(findings.strays)

    def _remove_strays(self, found: set[str]) -> None:
        """A sandbox without an owner may be one that is being created: not if all creations began after it was seen."""
        now = asyncio.get_running_loop().time()
        self._strays = {id: self._strays.get(id, now) for id in found}
        for id, first_seen in self._strays.items():
            if first_seen < min(now, self._care.making_since):
                self._begin(self._remove(id))

    async def _remove(self, id: str) -> None:
        await self._care.remove_stray(id)  # or at the next look

    def _act(self, findings: Findings, expected: Mapping[str, tuple[Place, int]], began: float) -> None:
        """``began``: when the look did."""
        for id, reason in findings.lost.items():
            place, epoch = expected[id]
            if place.epoch == epoch:
                self._ward.lost(place, reason)
        for id in findings.frozen:
            place, epoch = expected[id]
            if not place.paused and not place.box.was_paused(began):
                self._ward.condemn(place, epoch, "frozen")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _find(self, id: str) -> Place | None:
        places = (place for place in self._ward.places() if place.state in _EXPECTED)
        return next((place for place in places if place.box.id == id), None)
