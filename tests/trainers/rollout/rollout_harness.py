"""A rollout loop with the scripted engine and the puppet environment, and a record of how every episode ended."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from rollout_doubles import Latency, Script, ScriptedEngine
from rollout_envs import AsyncPuppet, Puppet

from agentkit import registry
from agentkit.config import ModelConfig, RunConfig
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.trainers.rollout.plugin import make_parser
from agentkit.trainers.rollout.renderer import ChatRenderer, make_renderer
from agentkit.trainers.weights.base import WeightsInPlace
from agentkit.types import Group, Trajectory

GO = "<answer>Go</answer>"


@lru_cache(maxsize=1)
def renderer() -> ChatRenderer:
    return ChatRenderer(load_tokenizer("quickstart"))


def configure(env: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """A small run on the puppet; ``env`` holds its arguments, ``settings`` those of the ``env`` section."""
    registry.register("Puppet-v0", Puppet)
    registry.register("AsyncPuppet-v0", AsyncPuppet)
    settings = sections.pop("settings", {})
    rollout = {"groups": 2, "group_size": 2, **sections.pop("rollout", {})}
    return RunConfig.model_validate(
        {"env": {"id": "Puppet-v0", "kwargs": env or {}, **settings}, "rollout": rollout, **sections}
    )


class Harness:
    """A rollout loop under test; ``step`` does the same as a controller in a training step."""

    def __init__(self, config: RunConfig, script: Script | str = GO, latency: Latency = 0.0) -> None:
        self.config = config
        appends = config.model == ModelConfig()
        self.renderer = renderer() if appends else make_renderer(config.model, load_tokenizer("quickstart"), 20)
        self.engine = ScriptedEngine(self.renderer, script, latency)
        self.ends: list[tuple[Trajectory, str, str]] = []
        self.events: list[dict[str, Any]] = []
        self.loop = self.new_loop()
        self.version = 0

    def new_loop(self) -> RolloutLoop:
        parser = make_parser(self.config, self.config.env.actions_per_turn or 3)
        return RolloutLoop(
            self.config,
            self.engine,
            self.renderer,
            parser,
            on_episode=self._note,
            on_event=lambda kind, **fields: self.events.append({"event": kind, **fields}),
        )

    def _note(self, trajectory: Trajectory, ending: str, reason: str) -> None:
        self.ends.append((trajectory, ending, reason))

    async def step(self) -> list[Group]:
        batch = await self.loop.next_batch()
        for group in batch:
            assert len(group.members) == self.config.rollout.group_size
            assert self.version - group.version_started <= self.loop.gate.max_staleness
            assert all(member.version_started >= group.version_started for member in group.members)
            assert all(member.outcome != "voided" for member in group.members)
        self.version += 1
        await self.loop.publish(WeightsInPlace(self.version))
        return batch

    async def run(self, steps: int) -> list[list[Group]]:
        await self.loop.start()
        try:
            return [await self.step() for _ in range(steps)]
        finally:
            await self.loop.close()

    @property
    def endings(self) -> Counter[tuple[str, str]]:
        return Counter((ending, reason) for _, ending, reason in self.ends)

    def check_book(self) -> None:
        """Assert that every episode that sent a request to the engine ended exactly once."""
        names = [f"0.{t.group_id}.{t.member}.{t.attempt}" for t, _, _ in self.ends]
        assert len(names) == len(set(names))
        assert set(self.engine.prompts) <= set(names)
        assert len({id(t) for t, _, _ in self.ends}) == len(self.ends)
