"""The simulated engine and environment that all schedulers run against, in real time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentkit.envs.base import AsyncTextEnv
from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode, Sampling
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import Weights
from benchmarks.rollout.workload import ENGINE_S, SLOTS, Workload


class SimulatedEngine:
    """Answers in exactly ``ENGINE_S`` seconds, ``SLOTS`` requests at a time, first come first served.

    The clock of a slot does not depend on the event loop: a waiting request gets the slot from the time at which it
    became free, not from the later time at which Python noticed. The simulation therefore adds no time.
    """

    def __init__(self, renderer: ChatRenderer | None) -> None:
        ids = renderer.encode_answer("<answer>Go</answer>") if renderer else np.zeros(1, np.int32)
        self._answer = Generation(ids, np.full(len(ids), -0.7, np.float32), ((0, len(ids)),), "stop")
        self._free = [0.0] * SLOTS

    async def start(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        await self.turn()
        return self._answer

    async def turn(self) -> None:
        """Take a slot for one answer."""
        loop = asyncio.get_running_loop()
        done = max(loop.time(), self._free[0]) + ENGINE_S
        heapq.heapreplace(self._free, done)
        await _until(loop, done)

    async def abort(self, session: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weights: Weights) -> int:
        return weights.version

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0.0, 0, 0)

    async def close(self) -> None: ...


async def _until(loop: asyncio.AbstractEventLoop, when: float) -> None:
    future: asyncio.Future[None] = loop.create_future()
    handle = loop.call_at(when, _wake, future)
    try:
        await future
    finally:
        handle.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class WaitingRoom(AsyncTextEnv):
    """Environment that waits as the workload specifies. The seed is the task; the order of ``reset`` is the member."""

    instructions = "Wait."
    max_turns = 10
    load = Workload()
    arrivals: dict[int, int]

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed)
        assert seed is not None
        member = type(self).arrivals.get(seed, 0)
        type(self).arrivals[seed] = member + 1
        self.waits = type(self).load.env_seconds(seed, member)
        self.turn = 0
        return "Wait.", {"success": False, "action_valid": True}

    async def step(self, action: str) -> Any:
        loop = asyncio.get_running_loop()
        await _until(loop, loop.time() + self.waits[self.turn])
        self.turn += 1
        done = self.turn == len(self.waits)
        return "Wait.", float(done), done, False, {"success": done, "action_valid": True}
