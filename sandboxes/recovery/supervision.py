"""Supervise one target: record the calls on it and, when it is lost, rebuild its state in another target.

Invariant: there is at most one recovery at a time, and no call is made meanwhile. A recovered target has the state
after exactly the recorded calls. Every target that was acquired is released. A target that must be recovered more often
than its ``RestartLimit`` allows has failed for good, until ``begin``.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from agentkit.errors import AgentkitError, SandboxLost
from agentkit.sandboxes.backoff import Backoff, RestartLimit
from agentkit.sandboxes.recovery.hedge import Hedge, Operation
from agentkit.sandboxes.recovery.record import Means, Recovery, RecoveryLog
from agentkit.sandboxes.recovery.replay import ActionLog, Diverged
from agentkit.sandboxes.recovery.standby import Standbys, Target
from agentkit.sandboxes.tasks import loop_time, stopped

T = TypeVar("T", bound=Target)
R = TypeVar("R")
GivenUp = Literal["unreplayable", "diverged", "crash loop"]


class NotRecovered(Exception):
    """A recovery was given up. ``error`` is what the calls raise."""

    def __init__(self, error: AgentkitError) -> None:
        super().__init__(str(error))
        self.error = error


class Supervised(ABC, Generic[T]):
    """One supervised target. Calls run one after another. Subclasses say what a target is and what its errors mean.

    If its target is lost, a call raises the error, or is made again on the recovered target if the class ``repeats``.

    Args:
        describe: returns the bytes of a result that two runs of one call must have in common.
        replays: whether calls are recorded and replayed. Otherwise a recovered target starts without their effects.
        standbys: number of hot standbys; they need ``replays``.
        limit: number of recoveries within a window of time.
        log: where finished recoveries are recorded.
        hedge: hedges slow calls; None: never.
        rng: generator of the delays between recoveries.

    Attributes:
        target: the target in use; None before the first call.
        failure: why it was not recovered; None while it is usable.
        recoveries: number of recoveries so far.
        cause: cause of the last loss.
        places: host and sandbox of each target since ``begin``, in order.
    """

    repeats: ClassVar[bool]
    """Whether a call may be made again after its target was lost, because all its effects are lost too."""

    def __init__(
        self,
        describe: Callable[[Any], bytes],
        *,
        replays: bool = True,
        standbys: int = 0,
        limit: RestartLimit,
        log: RecoveryLog | None = None,
        hedge: Hedge | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.target: T | None = None
        self.failure: AgentkitError | None = None
        self.recoveries = 0
        self.cause = ""
        self.places: list[tuple[str, str]] = []
        self.replays = replays
        self._log: ActionLog[T] = ActionLog(describe)
        self._losses = 0
        """Number of lost targets since the last call began."""
        self._fruitless = 0
        """Number of attempts to recover since the last call that succeeded."""
        self._number = standbys
        self._standbys: Standbys[T] | None = None
        self._limit, self._records, self._hedge = limit, log or RecoveryLog(), hedge
        self._rng, self._backoff = rng or random.Random(), Backoff()
        self._order = asyncio.Lock()
        self._recovering: asyncio.Task[None] | None = None
        self._stopped = False

    # What a target is.

    @abstractmethod
    async def acquire(self, apart: Sequence[T]) -> tuple[T, Means]:
        """Return a fresh target, if possible apart from the given ones. Raises ``AgentkitError``."""

    async def renew(self, lost: T) -> tuple[T, Means]:
        """Release a lost target and return one in the state in which the recorded calls began."""
        lost.release(discard=True)  # first, since there may be no room for another one
        return await self.acquire([lost, *(self._standbys.targets if self._standbys is not None else ())])

    @abstractmethod
    def loss(self, error: AgentkitError) -> str | None:
        """Return the cause if the error of a call shows that its target is lost, else None."""

    @abstractmethod
    async def irrecoverable(self, target: T, error: AgentkitError | None) -> AgentkitError | None:
        """Return the error of all further calls if a lost target must not be recovered, else None.

        Called before the target is released.
        """

    @abstractmethod
    def given_up(self, why: GivenUp, text: str, last: Exception | None) -> AgentkitError:
        """Return the error of all further calls after a recovery that was given up."""

    def failed(self, failure: AgentkitError) -> AgentkitError:
        """Return the error of a call after ``failure``."""
        return failure

    # Calls.

    async def running(self) -> T:
        """Return the target, once it is recovered; acquire it if there is none. Raises ``AgentkitError``."""
        while True:
            if self._recovering is not None:
                await asyncio.wait({self._recovering})
            elif self.failure is not None:
                raise self.failed(self.failure)
            elif self._stopped:
                raise self.failed(SandboxLost("it was stopped", reason="closed"))
            elif self.target is None:
                self._adopt(await self._acquire_first())
            else:
                return self.target

    async def _acquire_first(self) -> T:
        """Acquire a target; another one if it is lost before its first call, as often as the limit allows."""
        while True:
            try:
                return (await self.acquire(()))[0]
            except SandboxLost:
                if not self._limit.allow(loop_time()):
                    raise

    async def begin(self, *, fresh: bool = False) -> None:
        """Forget the recorded calls, recoveries and a failure: the next call starts a new state.

        Args:
            fresh: whether the target and its standbys must not be used again.
        """
        self._log.clear()
        self._limit.clear()
        if self._recovering is not None:
            await asyncio.wait({self._recovering})
        if self.failure is not None or fresh or self._stopped:
            if self.target is not None:
                self.target.release(discard=True)
            self.failure = self.target = None
            self._stopped = False
        self.places = [] if self.target is None else [(self.target.host, self.target.sandbox_id)]
        if fresh and self._standbys is not None:
            standbys, self._standbys = self._standbys, None
            await standbys.close()
        self._wake()

    def forbid_replay(self, reason: str) -> None:
        """Declare that the state cannot be rebuilt, until ``begin``."""
        self._log.give_up(reason)
        self._wake()

    async def act(
        self,
        name: str,
        run: Callable[[T], Awaitable[R]],
        *,
        size: int = 0,
        record: bool = True,
        hedge: Operation | None = None,
    ) -> R:
        """Make a call.

        Args:
            name: of the call, for messages.
            run: makes the call on a target.
            size: bytes of data that ``run`` holds.
            record: whether the call has effects that a recovery must rebuild.
            hedge: the operation by whose durations the call is hedged; None: it is not.

        Raises:
            AgentkitError: the error of the call, or why its target is not recovered.
        """
        record = record and self.replays
        async with self._order:
            self._losses = 0
            while True:
                target = await self.running()
                try:
                    target, result = await self._attempt(run, target, hedge)
                    if self.target is target and self._recovering is None:
                        break
                    lost = SandboxLost(f"{name}: its target was replaced during the call", reason="replaced")
                except asyncio.CancelledError:
                    if record:
                        self.forbid_replay(f"{name} was cancelled, so its effect is not known")
                    raise
                except AgentkitError as error:
                    cause = self.loss(error)
                    if cause is None:
                        if record and error.side_effects != "none":
                            self.forbid_replay(f"{name} failed ({error}), so its effect is not known")
                        raise
                    self.notice(target, cause, error)
                    lost = error
                if not self.repeats:
                    raise lost
            self._fruitless = 0
            if record:
                self._log.record(name, run, result, size)
                self._wake()
            return result

    async def stop(self) -> None:
        """Release all targets; calls fail until ``begin``. Idempotent."""
        self._stopped = True
        if self._recovering is not None:
            await stopped([self._recovering])
        standbys, self._standbys = self._standbys, None
        if standbys is not None:
            await standbys.close()
        if self.target is not None:
            self.target.release()

    async def _attempt(self, run: Callable[[T], Awaitable[R]], first: T, operation: Operation | None) -> tuple[T, R]:
        """Make a call; if it is slow, make it on a second target too, which replaces the first if it answers first."""
        if self._hedge is None or operation is None:
            return first, await run(first)
        begun: list[T] = []

        async def attempt() -> tuple[T, R]:
            begun.append(first)
            if len(begun) == 1:
                return first, await run(first)
            target = await self._promoted() or (await self._replayed(*await self.acquire([first])))[0]
            try:
                return target, await run(target)
            except BaseException:
                target.release(discard=True)
                raise

        async def discard(outcome: tuple[T, R]) -> None:
            if outcome[0] is not first:
                outcome[0].release(discard=True)

        target, result = await self._hedge.run(
            operation, attempt, discard=discard, may=lambda: self._log.unreplayable is None
        )
        if target is not first and self.target is first and self._recovering is None:
            self._adopt(target)
            first.release(discard=True)
            return target, result
        await discard((target, result))  # a recovery that began meanwhile decides
        return first, result

    # Recovery.

    def notice(self, target: T, cause: str, error: AgentkitError | None = None) -> None:
        """Start a recovery of a target that is lost, unless one is under way."""
        if target is self.target and self._recovering is None and self.failure is None and not self._stopped:
            self.cause = cause
            self._recovering = asyncio.ensure_future(self._recover(target, cause, error))

    def _adopt(self, target: T) -> None:
        self.target = target
        if (place := (target.host, target.sandbox_id)) not in self.places:
            self.places.append(place)
        if self._number and self._standbys is None:
            self._standbys = Standbys(
                self.acquire, lambda: self.target, self._log, self._number, self._rng, self._records
            )
        target.on_failure(lambda cause: self.notice(target, cause))

    def _wake(self) -> None:
        if self._standbys is not None:
            self._standbys.wake()

    async def _recover(self, lost: T, cause: str, error: AgentkitError | None) -> None:
        began, host, sandbox = loop_time(), lost.host, lost.sandbox_id
        self._losses += 1
        try:
            if (final := await self.irrecoverable(lost, error)) is not None:
                raise NotRecovered(final)
            target, means = await self._until_rebuilt(lost, error)
            self.recoveries += 1
            seconds, message = loop_time() - began, "" if error is None else str(error)
            self._records.add(Recovery(cause, means, seconds, host, sandbox, message))
            self._adopt(target)
        except (AgentkitError, NotRecovered) as failure:
            self.failure = failure.error if isinstance(failure, NotRecovered) else failure
            self.cause = str(self.failure)
            lost.release(discard=True)
        finally:
            self._recovering = None
        if self.failure is None and self.target is not None and self.target.failure:
            self.notice(self.target, self.target.failure)

    async def _until_rebuilt(self, lost: T, error: AgentkitError | None) -> tuple[T, Means]:
        while True:
            if not self._limit.allow(loop_time()):
                text = f"{self._limit.limit} recoveries in {self._limit.window:g} s, the last because of {self.cause}"
                raise NotRecovered(self.given_up("crash loop", text, error))
            if self._fruitless:
                await asyncio.sleep(self._backoff.delay(self._fruitless, self._rng))
            self._fruitless += 1
            if self._log.unreplayable is not None and self.replays:
                raise NotRecovered(self.given_up("unreplayable", self._log.unreplayable, error))
            try:
                return await self._rebuild(lost)
            except AgentkitError as failure:
                if not failure.retryable:
                    raise
                error, self.cause = failure, str(failure)

    async def _rebuild(self, lost: T) -> tuple[T, Means]:
        standby = await self._promoted()
        if standby is not None:
            lost.release(discard=True)
            return standby, "standby"
        return await self._replayed(*await self.renew(lost))

    async def _promoted(self) -> T | None:
        return await self._standbys.promote() if self._standbys is not None else None

    async def _replayed(self, target: T, means: Means) -> tuple[T, Means]:
        try:
            try:
                await self._log.repeat_all(target)
            except Diverged as diverged:
                raise NotRecovered(self.given_up("diverged", str(diverged), diverged)) from diverged
            except AgentkitError as error:
                if (final := await self.irrecoverable(target, error)) is not None:
                    raise NotRecovered(final) from error
                raise
        except BaseException:
            target.release(discard=True)
            raise
        return target, means
