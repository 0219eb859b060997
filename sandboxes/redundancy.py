"""Hot standbys: sandboxes that do what the first one did, a moment later, so that one of them can take its place.

Invariant: a standby carries out the actions of the log in their order, each once, and only after the first sandbox did;
one that comes out differently, or is lost, is dropped and made anew, and never promoted. Each standby is a sandbox of
the pool and counts there.
"""

from __future__ import annotations

import asyncio

from agentkit.errors import PoolClosed, SandboxError, SandboxLost
from agentkit.sandboxes.aio import stopped
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.pool import Lease, SandboxPool
from agentkit.sandboxes.replay import ActionLog
from agentkit.sandboxes.sandbox import Sandbox

DIVERGENCES = 3
"""Standbys that came out differently after which there are no more: the actions depend on time or chance."""


class Standby:
    """One sandbox that follows a log."""

    def __init__(self, lease: Lease, log: ActionLog) -> None:
        self.lease = lease
        self.applied = 0
        self.taken: asyncio.Future[Lease] | None = None
        """Set once it is to be promoted; done when it has caught up."""
        self._log = log
        self._wake = asyncio.Event()
        lease.watch(self._give_up)

    @property
    def behind(self) -> int:
        return len(self._log) - self.applied

    def wake(self) -> None:
        self._wake.set()

    def _give_up(self, _: str) -> None:
        # Given back at once: what is still under way in it ends with it, should it hang.
        self.lease.release(discard=True)
        self.wake()

    async def follow(self) -> None:
        """Do what the log says, until it is promoted. Raises ``SandboxError`` if it is lost or diverges."""
        while True:
            self._wake.clear()
            if self._log.spoiled is not None:
                raise SandboxLost(f"it cannot follow any more: {self._log.spoiled}", reason="spoiled")
            if self.lease.ill:
                raise SandboxLost(f"standby {self.lease.box.id} is lost", reason="replaced")
            if self.behind > 0:
                await self._log.replay(self.lease.box, self.applied)
                self.applied += 1
            elif self.taken is not None:
                return
            else:
                await self._wake.wait()


class Standbys:
    """Keeps ``number`` standbys for one log. ``promote`` takes the one that is furthest on."""

    def __init__(self, pool: SandboxPool, log: ActionLog, number: int) -> None:
        self._pool, self._log = pool, log
        self._standbys: list[Standby] = []
        self._tasks = [asyncio.ensure_future(self._keep_one()) for _ in range(number)]
        self._backoff = Backoff()
        self.given_up: str | None = None
        """Why there are no standbys any more."""
        self.diverged = 0

    def wake(self) -> None:
        """The log has grown."""
        for standby in self._standbys:
            standby.wake()

    def caught_up(self) -> list[Sandbox]:
        """Those in the very state of the first sandbox."""
        return [standby.lease.box for standby in self._standbys if standby.behind == 0 and not standby.lease.ill]

    async def promote(self) -> Lease | None:
        """A sandbox that has done all that the log says; None if there is none. It is the caller's from now on."""
        while self._standbys:
            best = min(self._standbys, key=lambda standby: standby.behind)
            best.taken = asyncio.get_running_loop().create_future()
            best.wake()
            try:
                return await best.taken
            except SandboxError:
                continue  # it was lost on the way, and is out of the list: the next one
            except asyncio.CancelledError:
                if not best.taken.cancelled() and best.taken.exception() is None:
                    best.taken.result().release(discard=True)
                raise
        return None

    async def close(self) -> None:
        """Give all of them back."""
        await stopped(self._tasks)

    async def _keep_one(self) -> None:
        failures = 0
        while self.given_up is None:
            try:
                lease = await self._pool.take()
                failures = 0
                await self._run(Standby(lease, self._log))
            except SandboxError as error:
                reason = error.details.get("reason")
                self.diverged += reason == "diverged"
                if reason == "spoiled" or self.diverged >= DIVERGENCES:
                    self.given_up = str(error)
                    return
                failures += 1
                await asyncio.sleep(self._backoff.delay(failures, self._pool.rng))

    async def _run(self, standby: Standby) -> None:
        """Follow until promoted, and then hand it over; otherwise it goes back to the pool."""
        self._standbys.append(standby)
        try:
            await standby.follow()
        except BaseException as error:
            standby.lease.release(discard=True)
            if standby.taken is not None and not standby.taken.done():
                standby.taken.set_exception(error if isinstance(error, SandboxError) else PoolClosed("closing"))
            raise
        else:
            if standby.taken is None or standby.taken.done():  # whoever wanted it has left
                standby.lease.release(discard=True)
            else:
                standby.taken.set_result(standby.lease)
        finally:
            self._standbys.remove(standby)
