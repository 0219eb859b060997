"""Cost of the rollout loop: turns per second on one core, bytes per idle episode, growth with concurrency.

The engine answers at once with prepared tokens and the environment does almost nothing. The measured cost is that of
the loop: rendering and tokenising observations, decoding and parsing answers, records, gate, event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.envs.base import Concurrency, TextEnv
from agentkit.trainers.inference.base import EngineStats, Generation, InferenceEngine, PauseMode, Sampling
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.groups import OnEpisode
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import Weights, WeightsInPlace

TURNS = 10
ANSWERS = ("Left", "Down", "Right", "Up")


class GridTalk(TextEnv):
    """Shows a grid and a counter. ``unique``: no two observations are ever the same, so that no cache helps."""

    instructions = "Walk from S to G over the frozen lake without falling into a hole."
    max_turns = TURNS
    concurrency: ClassVar[Concurrency] = "inline"
    _serial = itertools.count()

    def __init__(self, unique: bool = False) -> None:
        super().__init__()
        self.unique = unique

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return self._text(), {"success": False, "action_valid": True}

    def step(self, action: str) -> Any:
        self.count += 1
        return self._text(), 0.0, self.count >= TURNS, False, {"success": False, "action_valid": True}

    def _text(self) -> str:
        number = next(self._serial) if self.unique else self.count
        return f"P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G\nturn {number}"


class InstantEngine:
    """Answers after one round of the event loop, or, while ``held``, not at all."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._answers = [
            Generation(ids, np.full(len(ids), -0.7, np.float32), ((0, len(ids)),), "stop")
            for ids in (renderer.encode_answer(f"<answer>{word}</answer>") for word in ANSWERS)
        ]
        self._waiting: list[asyncio.Future[Generation]] = []
        self.held = False
        self.turns = 0

    async def start(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        loop = asyncio.get_running_loop()
        if not self._waiting and not self.held:
            loop.call_soon(self._answer)
        future: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append(future)
        return await future

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            self.turns += 1
            if not future.done():
                future.set_result(self._answers[self.turns % 4])

    def release(self) -> None:
        self.held = False
        self._answer()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def abort(self, session: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weights: Weights) -> int:
        return weights.version

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0.0, 0, len(self._waiting))

    async def close(self) -> None: ...


def grid_loop(
    engine: InferenceEngine,
    renderer: ChatRenderer,
    envs: int,
    *,
    unique: bool,
    on_episode: OnEpisode = lambda trajectory, ending, reason: None,
) -> RolloutLoop:
    """Return a rollout loop of ``envs`` episodes of ``GridTalk`` at a time, in groups of 8."""
    registry.register("GridTalk-v0", GridTalk)
    config = RunConfig.model_validate(
        {
            "env": {"id": "GridTalk-v0", "kwargs": {"unique": unique}},
            "rollout": {"groups": max(1, envs // 8), "group_size": 8},
        }
    )
    return RolloutLoop(config, engine, renderer, ActionParser("tagged", 1), on_episode=on_episode)


def _loop(envs: int, *, unique: bool) -> tuple[RolloutLoop, InstantEngine]:
    renderer = ChatRenderer(load_tokenizer("quickstart"))
    engine = InstantEngine(renderer)
    return grid_loop(engine, renderer, envs, unique=unique), engine


async def _rate(envs: int, turns: int, *, unique: bool) -> float:
    """Return turns per CPU second with ``envs`` episodes at a time, over whole batches of at least ``turns`` turns."""
    loop, engine = _loop(envs, unique=unique)
    await loop.start()
    try:
        version = 0
        for _ in range(1 + max(0, 500 // envs)):  # warm up
            version = await train_nothing(loop, version)
        before, start = engine.turns, time.process_time()
        while engine.turns - before < turns:
            version = await train_nothing(loop, version)
        return (engine.turns - before) / (time.process_time() - start)
    finally:
        await loop.close()


async def train_nothing(loop: RolloutLoop, version: int) -> int:
    """Consume a batch and publish the same weights as the next version."""
    await loop.next_batch()
    await loop.publish(WeightsInPlace(version + 1))
    return version + 1


async def _idle_bytes(envs: int) -> float:
    """Return the bytes per episode that waits for its first answer."""
    loop, engine = _loop(envs, unique=False)
    engine.held = True
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    await loop.start()
    for _ in range(10):  # every episode has asked for its first answer by then
        await asyncio.sleep(0)
    assert engine.waiting == envs
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    await loop.close()
    return size / envs


def measure(repeats: int = 3) -> dict[str, float]:
    """Return the figures of the loop; rates are the best of ``repeats``, because other load only lowers them."""

    def rate(envs: int, *, unique: bool) -> float:
        return max(asyncio.run(_rate(envs, 20_000, unique=unique)) for _ in range(repeats))

    figures = {f"turns_per_s_{envs}": rate(envs, unique=False) for envs in (104, 1000, 5000)}
    figures["turns_per_s_1000_uncached"] = rate(1000, unique=True)
    figures["cost_growth_100_to_5000"] = figures["turns_per_s_104"] / figures["turns_per_s_5000"]
    figures["idle_bytes"] = asyncio.run(_idle_bytes(1000))
    return figures
