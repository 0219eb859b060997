"""The cost of the controller: CPU per turn, memory, and delay of its event loop.

The loop, the gate, the router and the channel are the real ones. The engines are Ray actors that answer with prepared
tokens. The environment does almost nothing, but no observation appears twice, so that each one is tokenised. CPU time
is that of all threads of this process, Ray's included; it hardly depends on other programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from agentkit.trainers.inference.base import Generation, InferenceEngine, Sampling
from agentkit.trainers.inference.router import Replica, Router
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.types import Trajectory
from benchmarks.rollout.overhead import InstantEngine, grid_loop, train_nothing

ENGINES = 2
RATE = 1000.0
"""Turns per second that all episodes together ask for while their number grows: about a fifth of a core."""
SAMPLE_S = 0.01
"""Seconds between two samples of the event loop's delay."""
ARMS = ("loop", "loop, router", "loop, router, channel")


class ScriptedEngine(InstantEngine):
    """Answers at once with prepared tokens, or after random times with the given mean."""

    def __init__(self) -> None:
        super().__init__(ChatRenderer(load_tokenizer("quickstart")))
        self._mean_s = 0.0
        self._random = random.Random(0)

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        if self._mean_s:
            await asyncio.sleep(self._mean_s * self._random.uniform(0.5, 1.5))
        return await super().generate(prompt_ids, sampling, session=session)

    async def think(self, mean_s: float) -> None:
        """From now on, answer after ``mean_s`` seconds on average, half as many at least."""
        self._mean_s = mean_s

    async def cpu_s(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()


@contextlib.asynccontextmanager
async def actors() -> AsyncIterator[list[Any]]:
    """Start the engines as actors of the connected cluster; yield their proxies."""
    from agentkit.trainers.cluster import place
    from agentkit.trainers.cluster.placement import RolePlan
    from agentkit.trainers.cluster.ray_cluster import reserve_plans

    async with reserve_plans([RolePlan("engine", ({"CPU": 1.0},) * ENGINES, "engine.replicas")]) as slots:
        placing = [
            place("benchmarks.distributed.controller:ScriptedEngine", slots=(slot,), name=f"engine {index}")
            for index, slot in enumerate(slots["engine"])
        ]
        placed: list[Any] = list(await asyncio.gather(*placing))
        try:
            yield placed
        finally:
            await asyncio.gather(*(engine.close() for engine in placed))


async def routed(engines: Sequence[Any]) -> Router:
    """Return a router over ``engines``."""
    router = Router(len(engines))
    for index, engine in enumerate(engines):
        await router.join(Replica(index, engine))
    return router


class _Turns:
    """Counts the turns of episodes that have ended."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, trajectory: Trajectory, ending: str, reason: str) -> None:
        self.count += len(trajectory.turns)


# -- throughput -----------------------------------------------------------------------------------------------------


@dataclass
class Throughput:
    """Microseconds of CPU per turn, one entry per repetition."""

    arm: str
    controller_us: list[float] = field(default_factory=list)
    engine_us: list[float] = field(default_factory=list)
    """Of one actor, per turn that it computed; empty if the engines are in this process."""


async def throughput(episodes: int, turns: int, repeats: int) -> list[Throughput]:
    """Measure each arm ``repeats`` times in turn, with ``episodes`` in flight, over at least ``turns`` turns each."""
    found = {arm: Throughput(arm) for arm in ARMS}
    renderer = ChatRenderer(load_tokenizer("quickstart"))
    async with actors() as placed:
        local = [InstantEngine(renderer) for _ in range(ENGINES)]
        targets: list[InferenceEngine] = [local[0], await routed(local), await routed(placed)]
        for _ in range(repeats):
            for arm, target in zip(ARMS, targets, strict=True):
                remote = placed if target is targets[2] else []
                before = await _cpu_s(remote)
                counted, cpu = await _cpu_of(target, renderer, episodes, turns)
                found[arm].controller_us.append(1e6 * cpu / counted)
                if remote:
                    found[arm].engine_us.append(1e6 * (await _cpu_s(remote) - before) / counted)
    return list(found.values())


async def _cpu_s(engines: Sequence[Any]) -> float:
    return sum(await asyncio.gather(*(engine.cpu_s() for engine in engines)))


async def _cpu_of(engine: InferenceEngine, renderer: ChatRenderer, episodes: int, turns: int) -> tuple[int, float]:
    """Return the number of turns in whole batches, and the CPU seconds of this process for them."""
    counter = _Turns()
    loop = grid_loop(engine, renderer, episodes, unique=True, on_episode=counter.add)
    await loop.start()
    try:
        version = await train_nothing(loop, 0)
        before, start = counter.count, time.process_time()
        while counter.count - before < turns:
            version = await train_nothing(loop, version)
        return counter.count - before, time.process_time() - start
    finally:
        await loop.close()


# -- growth ---------------------------------------------------------------------------------------------------------


@dataclass
class Growth:
    """Figures with ``episodes`` in flight, one entry per repetition."""

    episodes: int
    turns_per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    """CPU microseconds of the controller per turn."""
    memory_kb: list[float] = field(default_factory=list)
    """Growth of the resident memory since a warm-up with the fewest episodes, per episode, in the first repetition."""
    delay_ms: list[list[float]] = field(default_factory=list)
    """Median, 99th percentile and maximum of the event loop's delay."""


async def growth(sizes: Sequence[int], seconds: float, repeats: int) -> list[Growth]:
    """Measure each number of episodes ``repeats`` times in turn, ``seconds`` each, at the same turns per second."""
    found = [Growth(size) for size in sizes]
    renderer = ChatRenderer(load_tokenizer("quickstart"))
    async with actors() as placed:
        router = await routed(placed)
        await _cpu_of(router, renderer, sizes[0], 5000)  # fills the caches of this process
        empty = psutil.Process().memory_info().rss
        for repeat in range(repeats):
            for one in found:
                await asyncio.gather(*(engine.think(one.episodes / RATE) for engine in placed))
                rss = await _hold(router, renderer, one, seconds)
                if repeat == 0:  # later, memory that larger sizes needed is used again
                    one.memory_kb.append((rss - empty) / one.episodes / 1024)
    return found


async def _hold(engine: Any, renderer: ChatRenderer, found: Growth, seconds: float) -> int:
    """Keep the episodes in flight, measure for ``seconds``, and return the resident memory then."""
    counted: Any = _Counted(engine)
    loop = grid_loop(counted, renderer, found.episodes, unique=True)
    await loop.start()
    training = asyncio.ensure_future(_train(loop))
    try:
        await asyncio.sleep(2 * found.episodes / RATE)  # all have had their first answer: they are spread over time
        turns, cpu, start = counted.turns, time.process_time(), time.perf_counter()
        delays = []
        while (now := time.perf_counter()) - start < seconds and not training.done():
            await asyncio.sleep(SAMPLE_S)
            delays.append(1e3 * max(0.0, time.perf_counter() - now - SAMPLE_S))
        turns = counted.turns - turns
        found.cpu_us.append(1e6 * (time.process_time() - cpu) / turns)
        found.turns_per_s.append(turns / (time.perf_counter() - start))
        percentiles = statistics.quantiles(delays, n=100, method="inclusive")
        found.delay_ms.append([percentiles[49], percentiles[98], max(delays)])
        if training.done():
            training.result()
        return psutil.Process().memory_info().rss
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await loop.close()


async def _train(loop: RolloutLoop) -> None:
    version = 0
    while True:
        version = await train_nothing(loop, version)


class _Counted:
    """An engine, and the number of its answers."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine, self.turns = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        answer = await self._engine.generate(*args, **kwargs)
        self.turns += 1
        return answer
