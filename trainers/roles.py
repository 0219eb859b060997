"""Starts what a run needs — learner, engine, renderer, parser — and stops all of it, whatever happens.

Invariant: whatever was started is closed, in reverse order, also when starting the next one fails. The engine is made
from the same configuration as the learner, but what it serves is only what was published to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.trainers.batch import Batch
from agentkit.trainers.cluster import place
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.hosts import EnvSource
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class Roles:
    """The parts of a run that talk to each other; ``learner`` and ``engine`` may live in processes of their own."""

    renderer: ChatRenderer
    parser: ActionParser
    learner: Any
    engine: InferenceEngine
    weights: Path
    """Where the learner publishes, and the engine reads, the policy's weights."""
    shared: bool
    """The engine computes with the learner's own weights: nothing is written, but they must not change in use."""

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        """One training step; its weights are then ready to be served as version ``step + 1``."""
        if self.shared:
            await self.engine.pause("abort")
        metrics = await self.learner.train(batch, step)
        await self._export(step + 1)
        return metrics

    async def publish(self, version: int) -> None:
        """Bring the learner's weights to an engine that nobody else is using. The rollout loop has its own way."""
        await self._export(version)
        await self.engine.pause("abort")
        try:
            await self.engine.update_weights(self.weights, version)
        finally:
            await self.engine.resume()

    async def _export(self, version: int) -> None:
        if not self.shared:
            await self.learner.publish(self.weights, version)


@contextlib.asynccontextmanager
async def start_roles(config: RunConfig, weights: Path) -> AsyncIterator[Roles]:
    """Learner and engine, started and placed as ``config`` says; the file ``weights`` connects them."""
    with progress.work("loading the tokenizer"):
        renderer = ChatRenderer(load_tokenizer(config.model.path))
    with progress.work(f"looking at {config.env.id}"):
        source = EnvSource.of(config.env)
    parser = ActionParser(config.env.parser, source.actions_per_turn)
    # The learner knows no environment, and one of its losses needs the number of turns.
    settled = config.model_copy(update={"env": config.env.model_copy(update={"max_turns": source.max_turns})})
    async with contextlib.AsyncExitStack() as stack:
        with progress.work("starting the learner"):
            learner = await place(
                "agentkit.trainers.learner.torch_learner:Learner",
                settled,
                placement=config.learner.placement,
                ranks=config.learner.ranks,
                threads=config.learner.threads,
                name="learner",
            )
            stack.push_async_callback(learner.close)
            await learner.start()
        shared = config.engine.share_weights
        with progress.work("starting the engine"):
            engine = await place_engine(config, **({"model_object": learner.model} if shared else {}))
            stack.push_async_callback(engine.close)
            await engine.start()
        yield Roles(renderer, parser, learner, engine, weights, shared)


async def place_engine(config: RunConfig, **extra: Any) -> Any:
    """The engine that ``config.engine`` names, constructed (with ``extra`` arguments) but not started."""
    factory = {
        "hf": "agentkit.trainers.inference.hf:HFEngine",
        "vllm": "agentkit.trainers.inference.vllm:VLLMEngine",
    }[config.engine.kind]
    return await place(
        factory,
        config.model,
        config.engine,
        seed=config.seed,
        deterministic=config.deterministic,
        placement=config.engine.placement,
        threads=config.engine.threads,
        name="engine",
        **extra,
    )
