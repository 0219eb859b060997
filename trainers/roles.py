"""Start and stop the parts of a run: learner, engine, renderer, parser.

Invariant: started parts are closed in reverse order, even if starting the next one fails. The engine is made from the
same configuration as the learner, but serves only published weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.trainers.batch import Batch
from agentkit.trainers.cluster import place, reserve
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.inference.replicas import OnEvent, Replicas
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.hosts import EnvSource
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import Weights, WeightsInPlace

if TYPE_CHECKING:
    from agentkit.trainers.cluster.placement import Slot


@dataclass(frozen=True, slots=True)
class Roles:
    """The parts of a run; ``learner`` and ``engine`` may be proxies of roles in other processes."""

    renderer: ChatRenderer
    parser: ActionParser
    learner: Any
    engine: InferenceEngine
    shared: bool
    """Whether the engine uses the learner's weights in place; they must not change while it computes."""

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Do one training step."""
        if self.shared:
            await self.engine.pause("abort")
        return await self.learner.train(batch, step)

    async def stage(self, version: int) -> Weights:
        """Make the learner's weights available to engines as ``version``, while they go on generating."""
        return WeightsInPlace(version) if self.shared else await self.learner.publish(version)

    async def publish(self, version: int) -> None:
        """Load the learner's weights into an engine that has no requests. (The rollout loop updates a busy engine.)"""
        weights = await self.stage(version)
        await self.engine.pause("abort")
        try:
            await self.engine.update_weights(weights)
        finally:
            await self.engine.resume()


@contextlib.asynccontextmanager
async def start_roles(config: RunConfig, on_event: OnEvent = lambda kind, **fields: None) -> AsyncIterator[Roles]:
    """Start learner and engine in the placement of ``config``; ``on_event`` gets the events of ``Replicas``."""
    with progress.work("loading the tokenizer"):
        renderer = ChatRenderer(load_tokenizer(config.model.path))
    with progress.work(f"looking at {config.env.id}"):
        source = EnvSource.of(config.env)
    parser = ActionParser(config.env.parser, source.actions_per_turn)
    # One of the losses needs the environment's number of turns.
    settled = config.model_copy(update={"env": config.env.model_copy(update={"max_turns": source.max_turns})})
    async with contextlib.AsyncExitStack() as stack:
        with progress.work("reserving the cluster") if config.cluster else contextlib.nullcontext():
            slots = await stack.enter_async_context(reserve(config))
        with progress.work("starting the learner"):
            learner = await place(
                "agentkit.trainers.learner.torch_learner:Learner",
                settled,
                slots=slots.get("learner"),
                placement=config.learner.placement,
                ranks=config.learner.ranks,
                threads=config.learner.threads,
                name="learner",
            )
            stack.push_async_callback(learner.close)
            await learner.start()
        shared = config.engine.share_weights
        with progress.work("starting the engine"):
            extra = {"model_object": learner.model} if shared else {}
            engine = await stack.enter_async_context(start_engine(config, on_event, slots.get("engine"), **extra))
        yield Roles(renderer, parser, learner, engine, shared)


@contextlib.asynccontextmanager
async def start_engine(
    config: RunConfig,
    on_event: OnEvent = lambda kind, **fields: None,
    slots: Sequence[Slot] | None = None,
    **extra: Any,
) -> AsyncIterator[InferenceEngine]:
    """Start what ``config.engine`` names: one engine in this process, or engines behind a router that replaces them.

    ``slots`` are their places in a cluster, if there is one. ``extra`` arguments go to the engines.
    """
    settings = config.engine
    if slots is None and settings.placement == "inline" and settings.replicas == 1:
        engine = await _place_engine(config, 0, None, extra)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()
        return
    replicas = Replicas(
        lambda index: _place_engine(config, index, slots, extra),
        settings.replicas,
        minimum=settings.min_replicas,
        deterministic=config.deterministic,
        on_event=on_event,
    )
    async with replicas as router:
        yield router


async def _place_engine(config: RunConfig, index: int, slots: Sequence[Slot] | None, extra: dict[str, Any]) -> Any:
    """Construct one engine; do not start it."""
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
        slots=slots and slots[index : index + 1],
        placement=config.engine.placement,
        threads=config.engine.threads,
        name="engine" if config.engine.replicas == 1 else f"engine {index}",
        **extra,
    )
