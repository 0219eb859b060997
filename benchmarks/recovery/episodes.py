"""Episodes of one environment, played as in a run: the run's pool of environments, with scripted actions.

Invariant: an episode is voided exactly if one of its calls raises an ``EnvError``, as in a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentkit.envs.isolation.allocator import EnvSlot
from agentkit.errors import EnvError
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.recovery.record import Recovery
from agentkit.trainers.rollout.hosts import EnvPool

T = TypeVar("T")
Script = tuple[int, Sequence[str]]
"""A seed, and the expert's actions."""
THINKING = 0.05
"""Seconds between two steps of the other episodes, for which a model would generate an answer."""


@dataclass(frozen=True)
class Timed:
    """A recovery, and when it finished."""

    recovery: Recovery
    at: float

    @property
    def detected(self) -> float:
        return self.at - self.recovery.seconds


class Recorder:
    """The recoveries of this process, by sandbox that was lost."""

    def __init__(self) -> None:
        self.found: dict[str, Timed] = {}

    def __call__(self, record: object) -> None:
        if isinstance(record, Recovery):
            self.found[record.sandbox] = Timed(record, time.perf_counter())


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Collect recoveries during the body of ``with``."""
    recorder = Recorder()
    with telemetry.listening(recorder):
        yield recorder


class Episode:
    """One episode, played step by step."""

    def __init__(self, pool: EnvPool, script: Script) -> None:
        self._pool = pool
        self.seed, self._actions = script
        self._left: list[str] = []
        self.handle: Any = pool.acquire()
        self.solved = False
        self.error: EnvError | None = None
        """Why it is void."""

    @property
    def sandbox(self) -> str:
        """Id of the sandbox that it runs in."""
        return self._slot.sandbox_id

    @property
    def host(self) -> str:
        """Host of this sandbox."""
        return self._slot.host

    @property
    def standbys(self) -> int:
        """Number of standbys that have followed it up to now."""
        standbys = self.handle._env._env._standbys
        return 0 if standbys is None else len(standbys.caught_up())

    @property
    def _slot(self) -> EnvSlot:
        return self.handle._env._env.target

    async def reset(self) -> None:
        """Start it, or start it again. Raises ``EnvError``."""
        self._left = list(self._actions)
        await self._noted(self.handle.reset(self.seed))

    async def step(self) -> None:
        """Take the next action. Raises ``EnvError``."""
        self.solved = (await self._noted(self.handle.act([self._left.pop(0)]))).success

    async def halfway(self) -> None:
        """Start it, and take the first half of the actions."""
        await self.reset()
        for _ in range(len(self._left) // 2):
            await self.step()

    async def finish(self, pause: float = 0.0) -> None:
        """Take all other actions, with a pause before each. Raises ``EnvError``."""
        while self._left:
            await asyncio.sleep(pause)
            await self.step()

    def close(self) -> None:
        """Return the environment to the pool."""
        self._pool.release(self.handle, failed=self.error is not None)

    async def _noted(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except EnvError as error:
            self.error = error
            raise


@dataclass
class Played:
    """Counts of the other episodes."""

    episodes: int = 0
    voided: int = 0


@contextlib.asynccontextmanager
async def others(pool: EnvPool, scripts: Sequence[Script], number: int) -> AsyncIterator[Played]:
    """Play ``number`` other episodes at a time during the body of ``async with``; wait until each has started."""
    played, started = Played(), [asyncio.Event() for _ in range(number)]

    async def play(player: int) -> None:
        rng = random.Random(player)
        while True:
            episode = Episode(pool, rng.choice(scripts))
            try:
                await episode.reset()
                started[player].set()
                await episode.finish(THINKING)
                played.episodes += 1
            except EnvError:
                played.voided += 1
            finally:
                episode.close()

    tasks = [asyncio.ensure_future(play(player)) for player in range(number)]
    try:
        waiting = asyncio.gather(*(event.wait() for event in started))
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
        yield played
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
