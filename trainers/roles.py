"""Start and stop the parts of a run: learner, engine, renderer, parser.

Invariant: started parts are closed in reverse order, even if starting the next one fails. The engine is made from the
same configuration as the learner, but serves only published weights. A learner that was lost can be started again,
beside the same engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.errors import EngineError, RoleError, WeightsUnavailable
from agentkit.model_files import template_text
from agentkit.trainers.batch import Batch
from agentkit.trainers.cluster import have_places, place, processes, reserve
from agentkit.trainers.inference.base import ManagedEngine
from agentkit.trainers.inference.replicas import PLACE_S, OnEvent, Replicas
from agentkit.trainers.inference.router import Send
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.hosts import EnvSource
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.plugin import make_parser
from agentkit.trainers.rollout.renderer import ChatRenderer, make_renderer
from agentkit.trainers.weights.base import Weights, WeightsInPlace

if TYPE_CHECKING:
    from agentkit.trainers.cluster.placement import Slot
    from agentkit.trainers.weights.sent import SentWeights


_NOTICE_S = 5.0
"""Seconds until the death of the learner is known here, after engines noticed it by the loss of its weights."""


class Roles:
    """The parts of a run; ``learner`` and ``engine`` may be proxies of roles in a cluster.

    ``start_roles`` makes it. ``learner`` is another object after each ``start_learner``.
    """

    learner: Any
    engine: ManagedEngine

    def __init__(
        self,
        config: RunConfig,
        renderer: ChatRenderer,
        parser: AnswerParser,
        slots: Sequence[Slot] | None,
        on_event: OnEvent,
    ) -> None:
        self._config, self._slots, self._on_event = config, slots, on_event
        self.renderer, self.parser = renderer, parser
        self.shared = config.engine.share_weights
        """Whether the engine uses the learner's weights in place; they must not change while it computes."""
        self._sleeps = config.engine.sleep
        self.learner = None
        self.learner_lost: asyncio.Future[RoleError] = asyncio.get_running_loop().create_future()
        """Done when the learner in a cluster is lost; its result is the cause."""

    async def start_learner(self) -> None:
        """Start the learner with its initial state, or start a lost one again.

        Raises ``RoleError`` if the cluster has no room for it any more, or if a rank dies; then ``learner_lost`` is
        done.
        """
        await self.close_learner()
        self.learner_lost = asyncio.get_running_loop().create_future()
        await self._wait_for_places()
        try:
            self.learner = await place(
                "agentkit.trainers.learner.torch_learner:Learner",
                self._config,
                slots=self._slots,
                name="learner",
            )
        except RoleError as error:
            self.learner_lost.set_result(error)
            raise
        self.learner_lost = getattr(self.learner, "lost", self.learner_lost)
        for rank, (host, pid) in enumerate(processes(self.learner, self._slots)):
            self._on_event("role_placed", role="learner", index=rank, host=host, pid=pid)
        await self.learner.start()

    async def close_learner(self) -> None:
        """Close the learner, if it was started. What a lost one raises says nothing new."""
        learner, self.learner = self.learner, None
        if learner is not None:
            with contextlib.suppress(RoleError):
                await learner.close()

    async def loss_of_learner(self, error: Exception) -> RoleError | None:
        """Return why the learner was lost, if ``error`` of a role may follow from that; None if the learner lives."""
        if self._slots is not None and isinstance(error, RoleError | EngineError):
            await asyncio.wait((self.learner_lost,), timeout=_NOTICE_S)
        return self.learner_lost.result() if self.learner_lost.done() else None

    async def _wait_for_places(self) -> None:
        if await have_places(self._slots):
            return
        assert self._slots is not None
        deadline = time.monotonic() + PLACE_S
        with progress.work("waiting for a node with room for the learner"):
            while not await have_places(self._slots):
                if time.monotonic() > deadline:
                    needs = ", ".join(f"{amount:g} {name}" for name, amount in self._slots[0].resources.items())
                    raise RoleError(
                        f"a node with a rank of the learner was lost, and no other had room for it within {PLACE_S:g} "
                        f"s (a rank needs {needs}): add a node and continue with --resume, or resume with fewer "
                        "learner.ranks"
                    )
                await asyncio.sleep(1.0)

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Do one training step."""
        if self.shared or self._sleeps:
            await self.engine.pause("abort")
        if self._sleeps:
            await self.engine.sleep()
        return await self.learner.train(batch, step)

    async def stage(self, version: int) -> Weights:
        """Make the learner's weights available to engines as ``version``, while they go on generating."""
        return WeightsInPlace(version) if self.shared else await self.learner.publish(version)

    async def send(self, weights: SentWeights) -> int:
        """Let the learner send published weights to engines; return how many receivers got them."""
        if self.learner is None:
            raise WeightsUnavailable("the learner is being started again")
        return await self.learner.send(weights)

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
    """Start learner and engine, here or in the cluster of ``config``.

    ``on_event`` gets the events of ``Replicas``, and ``role_placed`` with ``role``, ``index``, ``host`` and ``pid`` of
    each process.
    """
    with progress.work(f"looking at {config.env.id}"):
        source = EnvSource.of(config.env)
    with progress.work("loading the tokenizer"):
        tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
        renderer = make_renderer(config.model, tokenizer, source.max_turns, source.tools)
    parser = make_parser(config, source.actions_per_turn, renderer.tools)
    settled = _settled(config, source.max_turns)
    async with contextlib.AsyncExitStack() as stack:
        with progress.work("reserving the cluster") if config.cluster else contextlib.nullcontext():
            slots = await stack.enter_async_context(reserve(config))
        roles = Roles(settled, renderer, parser, slots.get("learner"), on_event)
        stack.push_async_callback(roles.close_learner)
        with progress.work("starting the learner"):
            await roles.start_learner()
        with progress.work("starting the engine"):
            extra = {"model_object": roles.learner.model} if roles.shared else {}
            roles.engine = await stack.enter_async_context(
                start_engine(config, on_event, slots.get("engine"), roles.send, **extra)
            )
        yield roles


def _settled(config: RunConfig, max_turns: int) -> RunConfig:
    """Fill in what the learner needs and may not be able to look up where it runs: the environment's number of turns,
    for one of the losses, and the text of the chat template, which it saves with the model."""
    template = config.model.chat_template
    model = config.model.model_copy(update={"chat_template": None if template is None else template_text(template)})
    return config.model_copy(update={"env": config.env.model_copy(update={"max_turns": max_turns}), "model": model})


@contextlib.asynccontextmanager
async def start_engine(
    config: RunConfig,
    on_event: OnEvent = lambda kind, **fields: None,
    slots: Sequence[Slot] | None = None,
    send: Send | None = None,
    **extra: Any,
) -> AsyncIterator[ManagedEngine]:
    """Start what ``config.engine`` names: one engine in this process, or engines behind a router that replaces them.

    ``slots`` are their places in a cluster, if there is one. ``send`` lets the learner send weights to them, see
    ``Router``. ``extra`` arguments go to the engines.
    """
    settings = config.engine
    if slots is None and settings.replicas == 1:
        engine = await _place_engine(config, 0, None, extra, on_event)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()
        return
    replicas = Replicas(
        lambda index: _place_engine(config, index, slots, extra, on_event),
        settings.replicas,
        minimum=settings.min_replicas,
        send=send,
        verify=settings.verify_weights,
        deterministic=config.deterministic,
        has_place=lambda index: have_places(slots and slots[index : index + 1]),
        on_event=on_event,
    )
    async with replicas as router:
        yield router


async def _place_engine(
    config: RunConfig, index: int, slots: Sequence[Slot] | None, extra: dict[str, Any], on_event: OnEvent
) -> Any:
    """Construct one engine; do not start it."""
    factory = {
        "hf": "agentkit.trainers.inference.hf:HFEngine",
        "vllm": "agentkit.trainers.inference.vllm:VLLMEngine",
    }[config.engine.kind]
    engine = await place(
        factory,
        config.model,
        config.engine,
        seed=config.seed,
        deterministic=config.deterministic,
        slots=slots and slots[index : index + 1],
        name="engine" if config.engine.replicas == 1 else f"engine {index}",
        **extra,
    )
    for host, pid in processes(engine, slots):
        on_event("role_placed", role="engine", index=index, host=host, pid=pid)
    return engine
