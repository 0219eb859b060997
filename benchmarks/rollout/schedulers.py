"""Rollout schedulers that are compared on the same simulated engine and environments.

``lock_step``: all episodes of a batch take their turn together, as in batched environment interfaces.
``trajectory_level``: episodes are independent, but a wave waits for its last episode, as with rollout workers behind a
barrier, and training waits for the wave. ``ours``: ``agentkit``'s rollout loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import WeightsInPlace
from benchmarks.rollout.simulation import SimulatedEngine, WaitingRoom
from benchmarks.rollout.workload import Workload


@dataclass(frozen=True)
class Plan:
    """One cell of the benchmark: the work, and the rules of scheduling."""

    load: Workload
    waves: int = 3
    groups: int = 32
    size: int = 8
    extra_groups: int = 0
    extra_members: int = 0
    async_ratio: float = 0.0
    train_s: float = 0.0
    step_timeout: float = 30.0
    policy: str = "wait"


async def lock_step(plan: Plan) -> float:
    """Seconds for all waves."""
    engine, start = SimulatedEngine(None), _now()
    for wave in range(plan.waves):
        waits = [plan.load.env_seconds(task, member) for task, member in _episodes(plan, wave)]
        for turn in range(plan.load.turns):
            await asyncio.gather(*(engine.turn() for _ in waits))
            await asyncio.gather(*(asyncio.sleep(wait[turn]) for wait in waits))
        await asyncio.sleep(plan.train_s)
    return _now() - start


async def trajectory_level(plan: Plan) -> float:
    """Seconds for all waves."""
    engine, start = SimulatedEngine(None), _now()

    async def episode(waits: tuple[float, ...]) -> None:
        for wait in waits:
            await engine.turn()
            await asyncio.sleep(wait)

    for wave in range(plan.waves):
        await asyncio.gather(*(episode(plan.load.env_seconds(*one)) for one in _episodes(plan, wave)))
        await asyncio.sleep(plan.train_s)
    return _now() - start


async def ours(plan: Plan) -> float:
    """Return seconds for all waves, including training and the publication of weights."""
    registry.register("WaitingRoom-v0", WaitingRoom)
    WaitingRoom.load, WaitingRoom.arrivals = plan.load, {}
    config = RunConfig.model_validate(
        {
            "env": {"id": "WaitingRoom-v0", "step_timeout": plan.step_timeout},
            "gate": {"policy": plan.policy},
            "rollout": {
                "groups": plan.groups,
                "group_size": plan.size,
                "extra_groups": plan.extra_groups,
                "extra_members": plan.extra_members,
                "async_ratio": plan.async_ratio,
            },
        }
    )
    renderer = ChatRenderer(_tokenizer())
    loop = RolloutLoop(config, SimulatedEngine(renderer), renderer, ActionParser("tagged"))
    start = _now()
    try:
        await loop.start()
        for wave in range(plan.waves):
            await loop.next_batch()
            await asyncio.sleep(plan.train_s)
            if wave + 1 < plan.waves:
                await loop.publish(WeightsInPlace(wave + 1))
        return _now() - start
    finally:
        await loop.close()


def _episodes(plan: Plan, wave: int) -> list[tuple[int, int]]:
    first = wave * plan.groups
    return [(task, member) for task in range(first, first + plan.groups) for member in range(plan.size)]


_loaded = []


def _tokenizer():
    if not _loaded:
        _loaded.append(load_tokenizer("quickstart"))
    return _loaded[0]


def _now() -> float:
    return asyncio.get_running_loop().time()
