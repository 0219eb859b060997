"""How long an update of weights stops generation.

Engines are Ray actors behind the router, which pauses, updates and resumes them as in a run. The pause is compared with
copying the same bytes once in this process, on one thread, while the engines are paused. Requests are in flight during
all updates; each token's log-probability is compared with a forward pass under the weights of its recorded version.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from agentkit.config import EngineConfig, ModelConfig
from agentkit.trainers.cluster import place
from agentkit.trainers.inference.base import Generation, InferenceEngine, Sampling
from agentkit.trainers.inference.router import Replica, Router
from agentkit.trainers.models.quickstart import quickstart_config, quickstart_tokenizer
from agentkit.trainers.weights.base import Staging
from agentkit.trainers.weights.object_store import StoredStaging
from agentkit.trainers.weights.shared_memory import SharedStaging


@dataclass(frozen=True)
class Size:
    """A model of about ``megabytes``, and the tokens of an answer."""

    megabytes: int
    width: int
    layers: int
    tokens: int


SIZES = (Size(2, 96, 3, 200), Size(50, 544, 4, 100), Size(500, 1344, 6, 40))
ENGINES = (1, 2, 4)
TRANSPORTS: dict[str, type[Staging]] = {"object store": StoredStaging, "shared memory": SharedStaging}
ENGINE = EngineConfig(max_batch=4, max_context=256, threads=1)
REQUESTS = 6
"""At each engine: as many as it computes, and two that wait."""
BETWEEN = 3
"""Tokens of each request between two updates, at least."""
LOGIT_STD = 0.5
"""Of most logits: neither uniform nor almost certain, so that the log-probabilities of two versions differ."""
VERSIONS = 7
"""Different weights; further versions repeat them."""
State = dict[str, torch.Tensor]


@dataclass
class Updates:
    """Updates of some engines through one transport; times in seconds, one entry per update."""

    transport: str
    engines: int
    megabytes: float
    stage_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)
    """From the end of the pause until all engines have sampled again. First they compute the keys and values of
    unfinished answers under the new weights."""
    in_flight: list[int] = field(default_factory=list)
    """Requests in flight at each update."""
    tokens: int = 0
    versions: int = 0
    """The most versions in one answer."""
    worst: float = 0.0
    """Largest difference of a recorded log-probability from the one under the weights of its version."""
    other: float = 0.0
    """The same under the weights of the next version: how different a wrong version would be (median)."""


async def measure(sizes: Sequence[Size], counts: Sequence[int], updates: int) -> list[Updates]:
    """Measure ``updates`` updates for each size, number of engines and transport."""
    from agentkit.trainers.cluster.placement import RolePlan
    from agentkit.trainers.cluster.ray_cluster import reserve_plans

    torch.set_num_threads(1)
    found = []
    for size in sizes:
        async with AsyncExitStack() as stack:
            path = stack.enter_context(tempfile.TemporaryDirectory())
            model = build(Path(path), size)
            plans = [RolePlan("engine", ({"CPU": 1.0},) * max(counts), "engine.replicas")]
            slots = (await stack.enter_async_context(reserve_plans(plans)))["engine"]
            served = ModelConfig(path=path, device="cpu")
            factory = "agentkit.trainers.inference.hf:HFEngine"
            placing = [
                place(factory, served, ENGINE, seed=0, slots=(slot,), name=f"engine {index}")
                for index, slot in enumerate(slots)
            ]
            engines: list[Any] = list(await asyncio.gather(*placing))
            for engine in engines:
                stack.push_async_callback(engine.close)
            await asyncio.gather(*(engine.start() for engine in engines))
            case = _Case(model, size, updates)
            for count in counts:
                for transport in TRANSPORTS:
                    found.append(await case.run(engines[:count], transport))
    return found


def build(directory: Path, size: Size) -> Qwen3ForCausalLM:
    """Write a model with random weights; return it."""
    config = quickstart_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = size.width, 3 * size.width, size.layers
    config.num_attention_heads = config.num_key_value_heads = size.width // 32
    config.layer_types = ["full_attention"] * size.layers
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        head = model.lm_head.weight
        head.mul_(LOGIT_STD / (head.std() * size.width**0.5))
    model.save_pretrained(directory)
    quickstart_tokenizer().save_pretrained(directory)
    return model


async def _sampled(engine: InferenceEngine, tokens: int) -> None:
    while (await engine.stats()).generated_tokens < tokens:  # noqa: ASYNC110 (engines report no events)
        await asyncio.sleep(0.001)


class _Case:
    """The weights of one model in several versions, and their updates."""

    def __init__(self, model: Qwen3ForCausalLM, size: Size, updates: int) -> None:
        self._model, self._tokens, self._updates = model, size.tokens, updates
        self._state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
        self._target = {name: torch.empty_like(value) for name, value in self._state.items()}
        self._version = 0

    def _next(self) -> tuple[int, State]:
        self._version += 1
        return self._version, self._of(self._version)

    def _of(self, version: int) -> State:
        """Return the weights of a version, computed from the first ones."""
        factor = 1 + 0.05 * (version % VERSIONS)
        return {name: value * factor if value.dim() == 2 else value for name, value in self._state.items()}

    async def run(self, engines: Sequence[Any], transport: str) -> Updates:
        """Update ``engines``; check every token that they sampled meanwhile."""
        megabytes = sum(value.nbytes for value in self._state.values()) / 1e6
        found = Updates(transport, len(engines), megabytes)
        router, staging = Router(len(engines), slack=0), TRANSPORTS[transport]()
        for index, engine in enumerate(engines):
            await router.join(Replica(index, engine))
        draw = np.random.default_rng(self._version)
        asked: dict[str, list[int]] = {}
        answers: dict[str, Generation] = {}
        ending = False

        async def ask() -> None:
            while not ending:
                session = f"{len(asked)}"
                asked[session] = draw.integers(3, 800, 20).tolist()
                answers[session] = await router.generate(asked[session], Sampling(self._tokens), session=session)

        try:
            await self._update(engines, router, staging, Updates(transport, 0, 0.0))  # the first version, not counted
            asking = [asyncio.ensure_future(ask()) for _ in range(REQUESTS * len(engines))]
            for _ in range(self._updates):
                await _sampled(router, (await router.stats()).generated_tokens + BETWEEN * len(asking))
                await self._update(engines, router, staging, found)
            ending = True
            await asyncio.gather(*asking)
            self._check([asked[session] for session in answers], list(answers.values()), found)
            return found
        finally:
            for session in asked.keys() - answers.keys():
                await router.abort(session)
            staging.release()

    async def _update(self, engines: Sequence[Any], router: Router, staging: Staging, found: Updates) -> None:
        version, state = self._next()
        began = time.perf_counter()
        weights = staging.stage(version, [list(state.items())])
        staged = time.perf_counter()
        await router.pause("keep")
        paused = time.perf_counter()
        copies = [self._copy_s(state) for _ in range(3)]
        stats = [await engine.stats() for engine in engines]
        copied = time.perf_counter()
        await router.update_weights(weights)
        await router.resume()
        resumed = time.perf_counter()
        for engine, before in zip(engines, stats, strict=True):
            if before.running:
                await _sampled(engine, before.generated_tokens + 1)
        found.in_flight.append(sum(each.running + each.waiting for each in stats))
        found.again_s.append(time.perf_counter() - resumed)
        found.pause_s.append(paused - staged + resumed - copied)
        found.stage_s.append(staged - began)
        found.copy_s.append(statistics.median(copies))

    def _copy_s(self, state: State) -> float:
        """Return the seconds for one copy of all tensors on one thread."""
        began = time.perf_counter()
        for name, tensor in state.items():
            self._target[name].copy_(tensor)
        return time.perf_counter() - began

    @torch.no_grad()
    def _check(self, prompts: list[list[int]], answers: Sequence[Generation], found: Updates) -> None:
        """Compare each recorded log-probability with those under the weights of its version and of the next one."""
        sequences = [[*prompt, *answer.ids.tolist()] for prompt, answer in zip(prompts, answers, strict=True)]
        tokens = torch.tensor(sequences)
        start = len(prompts[0])
        recorded = np.stack([answer.logprobs for answer in answers])
        versions = np.stack([np.repeat(*np.array(answer.versions).T) for answer in answers])

        def differences(version: int, served: int) -> np.ndarray:
            self._model.load_state_dict(self._of(served), strict=False)
            logits = self._model(input_ids=tokens).logits[:, start - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(2, tokens[:, start:, None])[..., 0].numpy()
            return np.abs(recorded - expected)[versions == version]

        torch.set_num_threads(os.cpu_count() or 1)
        seen = np.unique(versions).tolist()
        found.worst = max(float(differences(version, version).max()) for version in seen)
        found.other = float(np.median(differences(seen[-1], seen[-1] + 1)))
        torch.set_num_threads(1)
        found.tokens = versions.size
        found.versions = max(len(answer.versions) for answer in answers)
