"""The engines of a run: start them, watch them, replace those that are lost.

Invariant: a lost engine is closed before its replacement starts, and the replacement serves the router's version before
it gets requests. If fewer engines than the minimum are left, every call of the router raises the cause; the number of
restarts is bounded. Everything that was started is closed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from agentkit.errors import EngineError
from agentkit.sandboxes.backoff import Backoff, RestartLimit
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.inference.router import Replica, Router, is_lost

OnEvent = Callable[..., object]
"""Called with the kind of an event and its fields."""

HEARTBEAT_S = 5.0
"""Seconds between two questions to an engine whether it lives."""
SILENCE_S = 30.0
"""Seconds without an answer after which an engine counts as hung."""
RESTARTS = 3
"""Replacements of one engine within ``WINDOW_S``, successful or not."""
WINDOW_S = 600.0
_JOINS = 60
"""Attempts to load the served weights, one second apart."""
_BACKOFF = Backoff(base=1.0, least=0.5)


class Replicas:
    """Starts engines behind a router and replaces lost ones. ``async with Replicas(…) as router``."""

    def __init__(
        self,
        make: Callable[[int], Awaitable[InferenceEngine]],
        size: int,
        *,
        minimum: int = 1,
        deterministic: bool = False,
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
            deterministic: the loss of an engine is an error, see ``Router``.
            on_event: called with ``engine_lost``, ``engine_joined`` and ``engine_abandoned``.
            heartbeat_s: seconds between two questions to each engine.
            silence_s: seconds without an answer after which an engine is replaced.
            restarts: replacements of one engine within ``WINDOW_S``.
        """
        self.router = Router(size, deterministic=deterministic)
        self._make, self._size, self._minimum, self._on_event = make, size, minimum, on_event
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._restarts = 0 if deterministic else restarts
        self._left = size
        self._engines: set[InferenceEngine] = set()
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
        except Exception:
            await self._end(engine)
            raise
        return replica

    async def _join(self, replica: Replica) -> None:
        """Admit a replica. Between the publication of weights and their update, the served ones may be gone: wait."""
        for _ in range(_JOINS - 1):
            try:
                await self.router.join(replica)
                return
            except EngineError as error:
                if is_lost(error):
                    raise
            await asyncio.sleep(1)
        await self.router.join(replica)

    async def _watch(self, replica: Replica) -> None:
        """Expel a replica that does not answer, or answers with an error."""
        while True:
            await asyncio.wait((replica.lost,), timeout=self._heartbeat_s)
            if replica.lost.done():
                return
            try:
                await asyncio.wait_for(replica.engine.stats(), self._silence_s)
            except asyncio.TimeoutError:
                hung = f"engine {replica.index} hangs: it did not answer within {self._silence_s:g} s"
                self.router.expel(replica, EngineError(hung, fatal=True))
            except Exception as error:
                self.router.expel(replica, error)

    async def _keep(self, replica: Replica) -> None:
        """Replace the engine of one index whenever it is lost, as long as the limit of restarts allows."""
        limit, index = RestartLimit(self._restarts, WINDOW_S), replica.index
        while True:
            cause = await replica.lost
            lost = _now()
            self._event("engine_lost", cause, engine=index, version=replica.version)
            await self._end(replica.engine)
            for failures in itertools.count(1):
                if not limit.allow(_now()):
                    self._abandon(index, cause)
                    return
                try:
                    replica = await self._start(index)
                    break
                except Exception as error:
                    cause = error
                    self._event("engine_lost", cause, engine=index, version=replica.version)
                    await asyncio.sleep(_BACKOFF.delay(failures, random.Random()))
            self._on_event("engine_joined", engine=index, version=replica.version, seconds=_now() - lost)

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

    async def _end(self, engine: InferenceEngine) -> Exception | None:
        """Close an engine; return its error, which says nothing new about a lost one."""
        problem = None
        try:
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
