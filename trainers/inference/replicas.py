"""The engines of a run: start them, watch them, replace those that are lost.

Invariant: a lost engine is closed before its replacement starts, and the replacement serves the router's version before
it gets requests. An engine whose node is lost is replaced when the cluster has another place for it. If fewer engines
than the minimum are left, every call of the router raises the cause; the number of restarts is bounded. Everything that
was started is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from agentkit.errors import EngineError, WeightsUnavailable
from agentkit.sandboxes.backoff import Backoff, RestartLimit
from agentkit.trainers.inference.base import ManagedEngine
from agentkit.trainers.inference.router import Replica, Router, Send, is_lost

OnEvent = Callable[..., object]
"""Called with the kind of an event and its fields."""

HEARTBEAT_S = 2.0
"""Seconds between two questions to an engine whether it lives."""
SILENCE_S = 10.0
"""Seconds without an answer after which an engine counts as hung. Engines compute in threads or processes of their own,
so only imports, copies and a busy machine delay their answers."""
RESTARTS = 3
"""Replacements of one engine within ``WINDOW_S``, successful or not."""
WINDOW_S = 600.0
PLACE_S = 300.0
"""Seconds for which fewer engines than the minimum may be left while the others wait for a node with room."""
_JOINS = 600
"""Attempts to load the served weights, one second apart. They are gone while a lost learner is restored."""
_BACKOFF = Backoff(base=1.0, least=0.5)
_POLL_S = 1.0
"""Seconds between two looks for a place."""
_PARTS = 10


class EngineHung(EngineError):
    """An engine did not answer in time."""


async def _always(index: int) -> bool:
    return True


class Replicas:
    """Starts engines behind a router and replaces lost ones. ``async with Replicas(…) as router``."""

    def __init__(
        self,
        make: Callable[[int], Awaitable[ManagedEngine]],
        size: int,
        *,
        minimum: int = 1,
        send: Send | None = None,
        verify: bool = False,
        deterministic: bool = False,
        has_place: Callable[[int], Awaitable[bool]] = _always,
        on_event: OnEvent = lambda kind, **fields: None,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
        restarts: int = RESTARTS,
    ) -> None:
        """
        Args:
            make: constructs the engine of an index, and does not start it.
            size: number of engines.
            minimum: engines below which the run cannot go on. Engines that are being replaced count.
            send, verify: see ``Router``.
            deterministic: the loss of an engine is an error, see ``Router``.
            has_place: whether the engine of an index can be started: the node of its place lives.
            on_event: called with ``engine_lost``, ``engine_waiting``, ``engine_joined`` and ``engine_abandoned``.
            heartbeat_s: seconds between two questions to each engine.
            silence_s: seconds without an answer after which an engine is replaced.
            restarts: replacements of one engine within ``WINDOW_S``.
        """
        self.router = Router(size, send=send, verify=verify, deterministic=deterministic)
        self._make, self._size, self._minimum, self._on_event = make, size, minimum, on_event
        self._has_place = has_place
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._restarts = 0 if deterministic else restarts
        self._left = size
        self._engines: set[ManagedEngine] = set()
        """All engines that are not closed yet."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Router:
        """Start all engines. Raises the error of the first one that fails; then none is left running."""
        try:
            first = [self._task(self._start(index)) for index in range(self._size)]
            for replica in await asyncio.gather(*first):
                self._task(self._keep(replica))
        except BaseException:
            await self.close()
            raise
        return self.router

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all requests and close all engines. Idempotent."""
        await self.router.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        errors = await asyncio.gather(*map(self._end, set(self._engines)))
        for error in filter(None, errors):
            raise error

    async def _start(self, index: int) -> Replica:
        """Return a new engine that serves. If it fails, it is closed."""
        engine = await self._make(index)
        self._engines.add(engine)
        try:
            await engine.start()
            replica = Replica(index, engine)
            self._task(self._watch(replica))
            await self._join(replica)
        except BaseException:
            await self._end(engine)
            raise
        return replica

    async def _join(self, replica: Replica) -> None:
        """Admit a replica. Between the publication of weights and their update, the served ones may be gone: wait.

        A learner that keeps no copy of its weights cannot send them while it trains, which may take any time.
        """
        refusals = 0
        while True:
            try:
                await self.router.join(replica)
                return
            except EngineError as error:
                refusals += not isinstance(error, WeightsUnavailable)
                if is_lost(error) or refusals == _JOINS:
                    raise
            await asyncio.sleep(1)

    async def _watch(self, replica: Replica) -> None:
        """Expel a replica that does not answer, or answers with an error."""
        while True:
            await asyncio.wait((replica.lost,), timeout=self._heartbeat_s)
            if replica.lost.done():
                return
            try:
                await self._ask(replica)
            except Exception as error:
                self.router.expel(replica, error)

    async def _ask(self, replica: Replica) -> None:
        """Ask an engine for a sign of life. Raises its error, or ``EngineHung``."""
        answer = asyncio.ensure_future(replica.engine.stats())
        try:
            # In parts: while this process is stopped or busy, it hears no answer, and the time is not the engine's.
            for _ in range(_PARTS):
                await asyncio.wait((answer,), timeout=self._silence_s / _PARTS)
                if answer.done():
                    answer.result()
                    return
        finally:
            answer.cancel()
        raise EngineHung(f"engine {replica.index} hangs: it did not answer within {self._silence_s:g} s", fatal=True)

    async def _keep(self, replica: Replica) -> None:
        """Replace the engine of one index whenever it is lost, as long as the limit of restarts allows."""
        limit, index = RestartLimit(self._restarts, WINDOW_S), replica.index
        while True:
            cause = await replica.lost
            lost = _now()
            self._event("engine_lost", cause, engine=index, version=replica.version)
            await self._end(replica.engine, hangs=isinstance(cause, EngineHung))
            for failures in itertools.count(1):
                await self._wait_for_place(index, cause)
                if not limit.allow(_now()):
                    self._abandon(index, cause)
                    return
                try:
                    replica = await self._start_in_place(index, cause)
                    break
                except Exception as error:
                    cause = error
                    self._event("engine_lost", cause, engine=index, version=replica.version)
                    await asyncio.sleep(_BACKOFF.delay(failures, random.Random()))
            self._on_event("engine_joined", engine=index, version=replica.version, seconds=_now() - lost)

    async def _start_in_place(self, index: int, cause: Exception) -> Replica:
        """As ``_start``; begin again if the place is lost meanwhile, which says nothing about the engine."""
        while True:
            starting = self._task(self._start(index))
            try:
                while not starting.done() and await self._has_place(index):
                    await asyncio.wait((starting,), timeout=_POLL_S)
                if starting.done():
                    return starting.result()
            finally:
                starting.cancel()
            await asyncio.wait((starting,))
            await self._wait_for_place(index, cause)

    async def _wait_for_place(self, index: int, cause: Exception) -> None:
        """Wait until the cluster has a place for an engine. Meanwhile it does not count as left."""
        if await self._has_place(index):
            return
        self._left -= 1
        self._event("engine_waiting", cause, engine=index, engines_left=self._left)
        deadline = _now() + PLACE_S
        while not await self._has_place(index):
            if self._left < self._minimum and _now() > deadline:
                self.router.fail(
                    EngineError(
                        f"{self._left} of {self._size} engines are left, and engine.min_replicas={self._minimum}. No "
                        f"node had room for engine {index} within {PLACE_S:g} s after it was lost: {cause}",
                        fatal=True,
                    )
                )
            await asyncio.sleep(_POLL_S)
        self._left += 1

    def _abandon(self, index: int, cause: Exception) -> None:
        self._left -= 1
        self._event("engine_abandoned", cause, engine=index, engines_left=self._left)
        if self._left < self._minimum:
            self.router.fail(
                EngineError(
                    f"{self._left} of {self._size} engines are left, and engine.min_replicas={self._minimum}. Engine "
                    f"{index} was lost and started again {self._restarts} times within {WINDOW_S:g} s; the last time: "
                    f"{cause}",
                    fatal=True,
                )
            )

    async def _end(self, engine: ManagedEngine, *, hangs: bool = False) -> Exception | None:
        """Close an engine; return its error, which says nothing new about a lost one.

        One that ``hangs`` would not close itself, so its processes are killed at once.
        """
        problem, kill = None, getattr(engine, "kill", None)
        try:
            if hangs and kill is not None:
                await kill()
            await engine.close()
        except Exception as error:
            problem = error
        self._engines.discard(engine)  # Not if this is cancelled: then ``close`` waits for the engine.
        return problem

    def _event(self, kind: str, cause: Exception, **fields: Any) -> None:
        self._on_event(kind, error=type(cause).__name__, text=str(cause), **fields)

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    return asyncio.get_running_loop().time()
