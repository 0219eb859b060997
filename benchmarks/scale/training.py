"""Training in virtual time: the real rollout loop, gate and router; engines, learner and environments are models.

Invariant: computing takes no virtual time, so an outcome depends only on the setup and on decisions of the scheduler,
not on the machine. Two setups with the same ``work`` play the same episodes.

The model. An answer takes ``work.answers`` seconds on an engine that computes nothing else. An engine with ``b``
requests computes each of them ``1 + b / crowd`` times as slowly: a decoding step reads the weights once, and the keys
and values of each sequence. An environment step takes ``work.steps`` seconds, a training step ``train_s``. Prompts cost
nothing.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.envs.base import AsyncTextEnv
from agentkit.sandboxes.testing import virtual_time
from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode, Sampling
from agentkit.trainers.inference.router import Replica, Router
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import Weights, WeightsInPlace
from agentkit.types import Trajectory, Turn

_ID = np.zeros(1, np.int32)
_ANSWER = Generation(_ID, np.zeros(1, np.float32), ((0, 1),), "stop")
_ABORTED = Generation(_ID[:0], np.zeros(0, np.float32), (), "abort")


@dataclass(frozen=True)
class Work:
    """What the episodes of a setting need; the duration of each turn depends only on group, member and turn."""

    answers: np.ndarray
    """Seconds of answers computed alone, drawn in advance."""
    steps: np.ndarray
    """Seconds of environment steps, drawn in advance."""
    turns: int = 1

    def answer_s(self, group: int, member: int, turn: int) -> float:
        return float(self.answers[hash((group, member, turn)) % len(self.answers)])

    def step_s(self, group: int, member: int, turn: int) -> float:
        return float(self.steps[hash((turn, member, group)) % len(self.steps)])


@dataclass(frozen=True)
class Setup:
    """A cluster and its work."""

    work: Work
    engines: int
    train_s: float = 0.0
    groups: int = 32
    size: int = 8
    async_ratio: float = 0.0
    crowd: float = 1e9
    extra_groups: int = 0
    extra_members: int = 0
    steps: int = 4
    """Training steps that are measured."""
    warmup: int = 0
    """Training steps before them, in which the pipeline fills."""


@dataclass(frozen=True)
class Outcome:
    """What a simulated run took."""

    step_s: float
    """Seconds per training step."""
    staleness: float
    """Mean age of what was trained on, in versions."""
    engine_share: float
    """Share of the time in which an engine computes, mean over engines."""
    episodes: int
    """Episodes that were started; each has ended once."""
    at_once: int
    """Most environments in use at one time."""
    turns: int


class ModelledEngine:
    """Implements ``ManagedEngine``: processor sharing among its requests, in solo seconds."""

    def __init__(self, work: Work, crowd: float) -> None:
        self._work, self._crowd = work, crowd
        self._loop = asyncio.get_running_loop()
        self._ends: list[tuple[float, int, asyncio.Future[Generation]]] = []
        self._running = 0
        self._clock = 0.0
        """Solo seconds that a request present from the start would have got."""
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0
        self._turns: dict[str, int] = {}
        self._paused = False
        self._version = 0
        self.busy_s = 0.0
        self.turns = 0

    async def start(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        _, group, member, _ = map(int, session.split("."))
        need = self._work.answer_s(group, member, len(prompt_ids) // 2)
        self._advance()
        self._serial += 1
        future: asyncio.Future[Generation] = self._loop.create_future()
        heapq.heappush(self._ends, (self._clock + need, self._serial, future))
        self._running += 1
        self._schedule()
        try:
            return await future
        finally:
            if future.cancelled():
                self._advance()
                self._running -= 1
                self._schedule()

    def _advance(self) -> None:
        """Bring the clock to the present."""
        now = self._loop.time()
        if self._running and not self._paused:
            self._clock += (now - self._at) / (1 + self._running / self._crowd)
            self.busy_s += now - self._at
        self._at = now

    def _schedule(self) -> None:
        """Set the timer for the next answer; an early timer only looks again."""
        while self._ends and self._ends[0][2].done():
            heapq.heappop(self._ends)
        if not self._ends or self._paused:
            return
        when = self._at + max(0.0, self._ends[0][0] - self._clock) * (1 + self._running / self._crowd)
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        limit = self._clock + 1e-9 * max(1.0, self._clock)
        while self._ends and (self._ends[0][0] <= limit or self._ends[0][2].done()):
            self._end(heapq.heappop(self._ends)[2], _ANSWER)
        self._schedule()

    def _end(self, future: asyncio.Future[Generation], generation: Generation) -> None:
        if not future.done():
            self._running -= 1
            self.turns += generation is _ANSWER
            future.set_result(generation)

    async def abort(self, session: str) -> None: ...

    async def pause(self, mode: PauseMode) -> None:
        self._advance()
        self._paused = True
        if mode == "abort":
            ends, self._ends = self._ends, []
            for _, _, future in ends:
                self._end(future, _ABORTED)

    async def resume(self) -> None:
        self._advance()
        self._paused = False
        self._schedule()

    async def update_weights(self, weights: Weights) -> int:
        self._version = weights.version
        return weights.version

    async def stats(self) -> EngineStats:
        return EngineStats(self.turns, 0, 0, self.busy_s, self._running, 0)

    async def sleep(self) -> None: ...

    async def checksum(self) -> str:
        return ""

    async def close(self) -> None: ...


class ModelledEnv(AsyncTextEnv):
    """Waits as ``work`` says. The seed is the group; the order of ``reset`` is the member."""

    instructions = "Wait."
    max_turns = 1 << 20
    work: Work
    members: dict[int, int]
    in_use = most = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed)
        assert seed is not None
        self.group, self.turn = seed, 0
        self.member = ModelledEnv.members.get(seed, 0)
        cls = ModelledEnv
        cls.members[seed] = self.member + 1
        cls.in_use += 1
        cls.most = max(cls.most, cls.in_use)
        return str(seed), {"success": False, "action_valid": True}

    async def step(self, action: str) -> Any:
        wait = self.work.step_s(self.group, self.member, self.turn)
        if wait > 0:
            await asyncio.sleep(wait)
        self.turn += 1
        done = self.turn == self.work.turns
        ModelledEnv.in_use -= done
        return "", 1.0, done, False, {"success": done, "action_valid": True}


class _Renderer:
    """Replaces the tokenizer: one id per message. A first prompt differs between groups."""

    end_of_turn = 0
    stop_ids = (0,)
    rerenders = False

    def prompt(self, system: str, turns: Sequence[Turn], observation: str) -> np.ndarray:
        return _ID if turns else np.full(1, int(observation), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "<answer>Go</answer>"


def simulate(setup: Setup) -> Outcome:
    """Run ``setup`` and return what it took. Results do not depend on the machine."""
    return virtual_time.run(_train(setup), limit=1e12)


async def _train(setup: Setup) -> Outcome:
    registry.register("Modelled-v0", ModelledEnv)
    ModelledEnv.work, ModelledEnv.members, ModelledEnv.in_use, ModelledEnv.most = setup.work, {}, 0, 0
    config = RunConfig.model_validate(
        {
            "env": {"id": "Modelled-v0", "step_timeout": 1e9, "recovery": "retry"},
            "engine": {"max_context": 1 << 20},
            "rollout": {
                "groups": setup.groups,
                "group_size": setup.size,
                "extra_groups": setup.extra_groups,
                "extra_members": setup.extra_members,
                "async_ratio": setup.async_ratio,
                "in_flight": "continue",
                "max_tokens": 4096,
            },
        }
    )
    router = Router(setup.engines)
    engines = [ModelledEngine(setup.work, setup.crowd) for _ in range(setup.engines)]
    for index, engine in enumerate(engines):
        await router.join(Replica(index, engine))
    ended: set[tuple[int, int]] = set()

    def end(episode: Trajectory, ending: str, reason: str) -> None:
        assert (episode.group_id, episode.member) not in ended, "an episode ended twice"
        ended.add((episode.group_id, episode.member))

    loop = RolloutLoop(config, router, cast(ChatRenderer, _Renderer()), ActionParser("tagged"), on_episode=end)
    now = asyncio.get_running_loop().time
    ages: list[int] = []
    gc.freeze()
    try:
        await loop.start()
        begun = 0.0
        for step in range(setup.warmup + setup.steps):
            if step == setup.warmup:
                begun = now()
                for engine in engines:
                    engine._advance()
                    engine.busy_s = 0.0
            groups = await loop.next_batch()
            if step >= setup.warmup:
                ages += [step - group.version_started for group in groups]
                assert max(ages) <= setup.async_ratio
            await asyncio.sleep(setup.train_s)
            await loop.publish(WeightsInPlace(step + 1))
        took = now() - begun
        busy = sum(engine.busy_s for engine in engines) / (len(engines) * took)
        turns = sum(engine.turns for engine in engines)
    finally:
        await loop.close()
    started = sum(ModelledEnv.members.values())
    assert len(ended) == started, f"{started} episodes were started, and {len(ended)} have ended"
    return Outcome(took / setup.steps, float(np.mean(ages)), busy, started, ModelledEnv.most, turns)
