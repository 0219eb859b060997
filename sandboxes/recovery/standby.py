"""Hot standbys: targets that repeat the actions of a primary target, so that one of them can replace it.

Invariant: a standby carries out the actions of the log in order, each once, and only after the primary did. A standby
whose results differ, or that is lost, is replaced and never promoted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from agentkit.errors import AgentkitError, SandboxLost
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.recovery.record import Means, RecoveryLog
from agentkit.sandboxes.recovery.replay import ActionLog, Diverged
from agentkit.sandboxes.tasks import stopped

DIVERGENCES = 3
"""Number of diverged standbys after which no more are made: the actions depend on time or chance."""


class Target(Protocol):
    """A sandbox of a pool, or an environment, that can be replaced."""

    @property
    def host(self) -> str:
        """Name of the host on which it runs."""
        ...

    @property
    def sandbox_id(self) -> str:
        """Id of the sandbox that it is, or that it is in; empty if there is none."""
        ...

    @property
    def failure(self) -> str:
        """Why it must not be used any more; empty if it may."""
        ...

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the cause when it fails before its release, at once if it has failed."""
        ...

    def release(self, *, discard: bool = False) -> None:
        """Give it back, to be removed or used again in the background. Ends its calls in progress if it has failed."""
        ...


T = TypeVar("T", bound=Target)
Acquire = Callable[[Sequence[T]], Awaitable[tuple[T, Means]]]
"""Returns a fresh target, if possible apart from the given ones, and where it came from."""


class Standby(Generic[T]):
    """One target that follows a log."""

    def __init__(self, target: T, log: ActionLog[T]) -> None:
        self.target = target
        self.promotion: asyncio.Future[T | None] | None = None
        """Set by the caller that wants this standby; gets its target, or None if the standby fails first."""
        self._log = log
        self._epoch, self._applied = log.epoch, 0
        self._wake = asyncio.Event()
        target.on_failure(self._on_failure)

    @property
    def behind(self) -> int:
        """Number of actions that are still to be carried out."""
        return len(self._log) - (self._applied if self._epoch == self._log.epoch else 0)

    def wake(self) -> None:
        """Look at the log again."""
        self._wake.set()

    def _on_failure(self, _: str) -> None:
        self.target.release(discard=True)  # at once, since it ends an action that hangs
        self.wake()

    async def follow(self) -> None:
        """Carry out the actions of the log until promoted. Raises ``AgentkitError`` if lost, or ``Diverged``."""
        while self._log.unreplayable is None:
            self._wake.clear()
            if self._epoch != self._log.epoch:
                self._epoch, self._applied = self._log.epoch, 0
            if self.target.failure:
                raise SandboxLost("a standby is lost", reason="replaced")
            if self.behind > 0:
                await self._log.repeat(self._applied, self.target)
                self._applied += 1
            elif self.promotion is not None:
                return
            else:
                await self._wake.wait()
        raise SandboxLost(f"a standby cannot follow: {self._log.unreplayable}", reason="unreplayable")


class Standbys(Generic[T]):
    """A fixed number of standbys of one target.

    Args:
        acquire: acquires a standby.
        primary: returns the target that they follow.
        log: the actions of the primary target.
        number: how many standbys to keep.
        rng: generator of the delays between attempts.
        records: counts the standbys that follow.
    """

    def __init__(
        self,
        acquire: Acquire[T],
        primary: Callable[[], T | None],
        log: ActionLog[T],
        number: int,
        rng: random.Random,
        records: RecoveryLog,
    ) -> None:
        self._acquire, self._primary, self._log, self._rng = acquire, primary, log, rng
        self._records = records
        self._standbys: list[Standby[T]] = []
        self._promoted: T | None = None
        self._diverged = 0
        self._backoff = Backoff()
        self._changed = asyncio.Event()
        self._acquiring = asyncio.Lock()
        self._tasks = [asyncio.ensure_future(self._keep_one()) for _ in range(number)]

    @property
    def targets(self) -> list[T]:
        """The targets of all standbys."""
        return [standby.target for standby in self._standbys]

    def wake(self) -> None:
        """Look at the log, which has changed."""
        self._changed.set()
        for standby in self._standbys:
            standby.wake()

    def caught_up(self) -> list[T]:
        """Return the standbys that have carried out all actions."""
        return [standby.target for standby in self._standbys if standby.behind == 0 and not standby.target.failure]

    async def promote(self) -> T | None:
        """Take the most advanced standby out, once it has carried out all actions.

        Returns:
            Its target, which the caller must release, or None if no standby is left.
        """
        while self._standbys:
            best = min(self._standbys, key=lambda standby: standby.behind)
            best.promotion = asyncio.get_running_loop().create_future()
            best.wake()
            try:
                target = await best.promotion
            except asyncio.CancelledError:
                if not best.promotion.cancelled() and (target := best.promotion.result()) is not None:
                    target.release(discard=True)
                raise
            if target is not None:
                return target
        return None

    async def close(self) -> None:
        """Release all standbys."""
        await stopped(self._tasks)

    async def _keep_one(self) -> None:
        failures = 0
        while self._diverged < DIVERGENCES:
            self._changed.clear()
            if self._log.unreplayable is not None:
                await self._changed.wait()
                continue
            try:
                async with self._acquiring:  # one after the other, so that each knows from which to stay apart
                    apart = [one for one in (self._primary(), self._promoted, *self.targets) if one is not None]
                    target, _ = await self._acquire(apart)
                    standby = Standby(target, self._log)
                    self._standbys.append(standby)
                failures = 0
                await self._follow(standby)
            except (AgentkitError, Diverged) as error:
                self._diverged += isinstance(error, Diverged)
                failures += 1
                await asyncio.sleep(self._backoff.delay(failures, self._rng))

    async def _follow(self, standby: Standby[T]) -> None:
        """Let it follow the log, then hand it to the caller that promoted it or release it."""
        self._records.standbys += 1
        ready: T | None = None
        try:
            await standby.follow()
            ready = standby.target
        finally:
            self._standbys.remove(standby)
            self._records.standbys -= 1
            wanted = standby.promotion is not None and not standby.promotion.done()
            if standby.promotion is not None and wanted:
                self._promoted = ready
                standby.promotion.set_result(ready)
            if ready is None or not wanted:
                standby.target.release(discard=True)
