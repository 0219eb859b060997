"""Hot standbys: sandboxes that repeat the actions of a primary sandbox, so that one of them can replace it.

Invariant: a standby carries out the actions of the log in order, each once, and only after the primary did. A standby
whose results differ, or that is lost, is replaced and never promoted. Each standby is a sandbox of the pool and takes
one of its slots.
"""

from __future__ import annotations

import asyncio

from agentkit.errors import SandboxError, SandboxLost
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.recovery.replay import ActionLog, Diverged
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.tasks import stopped

DIVERGENCES = 3
"""Number of diverged standbys after which no more are made: the actions depend on time or chance."""


class Standby:
    """One sandbox that follows a log."""

    def __init__(self, lease: Lease, log: ActionLog[Sandbox]) -> None:
        self.lease = lease
        self.applied = 0
        """Number of actions carried out."""
        self.promotion: asyncio.Future[Lease | None] | None = None
        """Set by the caller that wants this standby; gets its lease, or None if the standby fails first."""
        self._log = log
        self._wake = asyncio.Event()
        lease.on_failure(self._on_failure)

    @property
    def behind(self) -> int:
        """Number of actions that are still to be carried out."""
        return len(self._log) - self.applied

    def wake(self) -> None:
        """Look at the log again."""
        self._wake.set()

    def _on_failure(self, _: str) -> None:
        self.lease.release(discard=True)  # at once, since it ends an action that hangs
        self.wake()

    async def follow(self) -> None:
        """Carry out the actions of the log until promoted. Raises ``SandboxError`` if lost, or ``Diverged``."""
        while self._log.unreplayable is None:
            self._wake.clear()
            if self.lease.failure:
                raise SandboxLost(f"standby {self.lease.box.id} is lost", reason="replaced")
            if self.behind > 0:
                await self._log.repeat(self.applied, self.lease.box)
                self.applied += 1
            elif self.promotion is not None:
                return
            else:
                await self._wake.wait()
        raise SandboxLost(f"a standby cannot follow: {self._log.unreplayable}", reason="unreplayable")


class Standbys:
    """A fixed number of standbys of one sandbox; made by ``Supervisor`` for ``replicas``.

    Args:
        pool: where the standbys are acquired.
        log: the actions of the primary sandbox.
        number: how many standbys to keep.
    """

    def __init__(self, pool: SandboxPool, log: ActionLog[Sandbox], number: int) -> None:
        self._pool, self._log = pool, log
        self._standbys: list[Standby] = []
        self._diverged = 0
        self._backoff = Backoff()
        self._tasks = [asyncio.ensure_future(self._keep_one()) for _ in range(number)]

    def wake(self) -> None:
        """Carry out the actions that were added to the log."""
        for standby in self._standbys:
            standby.wake()

    def caught_up(self) -> list[Sandbox]:
        """Return the standbys that have carried out all actions."""
        return [standby.lease.box for standby in self._standbys if standby.behind == 0 and not standby.lease.failure]

    async def promote(self) -> Lease | None:
        """Take the most advanced standby out, once it has carried out all actions.

        Returns:
            Its lease, which the caller must release, or None if no standby is left.
        """
        while self._standbys:
            best = min(self._standbys, key=lambda standby: standby.behind)
            best.promotion = asyncio.get_running_loop().create_future()
            best.wake()
            try:
                lease = await best.promotion
            except asyncio.CancelledError:
                if not best.promotion.cancelled() and (lease := best.promotion.result()) is not None:
                    lease.release(discard=True)
                raise
            if lease is not None:
                return lease
        return None

    async def close(self) -> None:
        """Release all standbys."""
        await stopped(self._tasks)

    async def _keep_one(self) -> None:
        failures = 0
        while self._diverged < DIVERGENCES and self._log.unreplayable is None:
            try:
                lease = await self._pool.acquire()
                failures = 0
                await self._follow(Standby(lease, self._log))
            except (SandboxError, Diverged) as error:
                self._diverged += isinstance(error, Diverged)
                failures += 1
                await asyncio.sleep(self._backoff.delay(failures, self._pool.rng))

    async def _follow(self, standby: Standby) -> None:
        """Let it follow the log, then hand it to the caller that promoted it or release it."""
        self._standbys.append(standby)
        ready: Lease | None = None
        try:
            await standby.follow()
            ready = standby.lease
        finally:
            self._standbys.remove(standby)
            wanted = standby.promotion is not None and not standby.promotion.done()
            if standby.promotion is not None and wanted:
                standby.promotion.set_result(ready)
            if ready is None or not wanted:
                standby.lease.release(discard=True)
