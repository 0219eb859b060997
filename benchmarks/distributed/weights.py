"""``python -m benchmarks.distributed.weights``: how long an update of weights stops generation.

Engines are Ray actors on this machine. For each number of engines, size and transport, the pause (from the first
``pause`` to the last ``resume``) is compared with copying the same bytes once in this process, measured directly before
and after each update. Requests stay in flight during all updates; each token's log-probability is compared with a
forward pass under the weights of its recorded version. Needs the extra ``ray`` and an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from agentkit.config import EngineConfig, ModelConfig
from agentkit.trainers.inference.base import Generation, PauseMode, Sampling
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models.quickstart import quickstart_config, quickstart_tokenizer
from agentkit.trainers.weights.base import Staging, Weights
from agentkit.trainers.weights.object_store import StoredStaging
from agentkit.trainers.weights.shared_memory import SharedStaging

WIDTHS = {2: (96, 3), 50: (544, 4), 500: (1344, 6)}
"""Nominal megabytes → width and number of layers."""
ENGINE = EngineConfig(max_batch=8, max_context=256, threads=1)
REQUESTS = 4
"""In flight at each engine."""
TIMEOUT_S = 600.0
State = dict[str, torch.Tensor]


class EngineActor:
    """One engine in a process of its own."""

    def __init__(self, path: str) -> None:
        self.engine = HFEngine(ModelConfig(path=path, device="cpu"), ENGINE, seed=0)

    async def start(self) -> None:
        await self.engine.start()

    async def generate(self, prompt: list[int], tokens: int, session: str) -> Generation:
        return await self.engine.generate(prompt, Sampling(tokens), session=session)

    async def pause(self, mode: PauseMode) -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def update(self, weights: Weights) -> int:
        return await self.engine.update_weights(weights)

    async def close(self) -> None:
        await self.engine.close()


def build(directory: Path, megabytes: int) -> Qwen3ForCausalLM:
    """Write a model of about that size with distributions that are far from uniform; return it."""
    width, layers = WIDTHS[megabytes]
    config = quickstart_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = width, 3 * width, layers
    config.num_attention_heads = config.num_key_value_heads = width // 32
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    model.save_pretrained(directory)
    quickstart_tokenizer().save_pretrained(directory)
    return model


def of_version(state: State, version: int) -> State:
    """Other weights for each version, computed from the first ones."""
    factor = 1 + 0.02 * version
    return {name: value * factor if value.dim() == 2 else value for name, value in state.items()}


def copy_s(source: State, target: State) -> float:
    """Return the seconds for one copy of all tensors on one thread."""
    began = time.perf_counter()
    for name, tensor in source.items():
        target[name].copy_(tensor)
    return time.perf_counter() - began


async def measure(model: Qwen3ForCausalLM, path: Path, engines: int, transport: str, updates: int) -> dict[str, Any]:
    """Update ``engines`` engines ``updates`` times; return medians, and what the check of all tokens found."""
    import ray

    remote: Any = ray.remote(EngineActor)
    actors = [remote.options(num_cpus=0, max_concurrency=100).remote(str(path)) for _ in range(engines)]
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    target = {name: torch.empty_like(value) for name, value in state.items()}
    staging: Staging = StoredStaging() if transport == "object store" else SharedStaging()
    await _all(actor.start.remote() for actor in actors)
    stage_times, pauses, copies = [], [], []
    try:
        asked = [
            (prompt, actor.generate.remote(prompt, 200, f"session-{index}-{number}"))
            for index, actor in enumerate(actors)
            for number, prompt in enumerate(_prompts(index))
        ]
        for version in range(1, updates + 1):
            newer = of_version(state, version)
            began = time.perf_counter()
            weights = staging.stage(version, [list(newer.items())])
            stage_times.append(time.perf_counter() - began)
            before = copy_s(newer, target)
            began = time.perf_counter()
            await _all(actor.pause.remote("keep") for actor in actors)
            served = await _all(actor.update.remote(weights) for actor in actors)
            await _all(actor.resume.remote() for actor in actors)
            pauses.append(time.perf_counter() - began)
            copies.append((before + copy_s(newer, target)) / 2)
            assert served == [version] * engines
        results = await _all(call for _, call in asked)
        checked = [_check(model, state, prompt, got) for (prompt, _), got in zip(asked, results, strict=True)]
        return {
            "transport": transport,
            "engines": engines,
            "MB": round(sum(value.nbytes for value in state.values()) / 1e6, 1),
            "stage s": statistics.median(stage_times),
            "pause s": statistics.median(pauses),
            "copy s": statistics.median(copies),
            "pause / copy": statistics.median(p / c for p, c in zip(pauses, copies, strict=True)),
            "tokens": sum(len(got.ids) for got in results),
            "versions in one answer": max(len(got.versions) for got in results),
            "largest error": max(checked),
            "load": os.getloadavg()[0],
        }
    finally:
        await _all(actor.close.remote() for actor in actors)
        for actor in actors:
            ray.kill(actor)
        staging.release()


def _prompts(index: int) -> list[list[int]]:
    return np.random.default_rng(index).integers(3, 800, (REQUESTS, 20)).tolist()


@torch.no_grad()
def _check(model: Qwen3ForCausalLM, state: State, prompt: Sequence[int], got: Generation) -> float:
    """Return the largest difference of a recorded log-probability from that under the weights of its version."""
    tokens = torch.tensor([[*prompt, *got.ids.tolist()]])
    start, worst = 0, 0.0
    for version, count in got.versions:
        model.load_state_dict(of_version(state, version) if version else state, strict=False)
        logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(got.logprobs - expected)[start : start + count].max()))
        start += count
    model.load_state_dict(state, strict=False)
    return worst


async def _all(calls: Any) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*(_value(call) for call in calls)), TIMEOUT_S)


async def _value(reference: Any) -> Any:
    return await reference


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.weights", description=__doc__)
    parser.add_argument("--engines", type=int, action="append", help="numbers of engines (1, 2 and 4)")
    parser.add_argument("--megabytes", type=int, action="append", choices=tuple(WIDTHS), help="sizes (all)")
    parser.add_argument("--transport", action="append", choices=("shared memory", "object store"))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/weights.json"))
    arguments = parser.parse_args()
    import ray

    torch.set_num_threads(1)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=2_000_000_000)
    rows = []
    try:
        for megabytes in arguments.megabytes or WIDTHS:
            with tempfile.TemporaryDirectory() as path:
                model = build(Path(path), megabytes)
                for engines in arguments.engines or (1, 2, 4):
                    for transport in arguments.transport or ("shared memory", "object store"):
                        rows.append(asyncio.run(measure(model, Path(path), engines, transport, arguments.updates)))
                        print(json.dumps(rows[-1]), flush=True)
    finally:
        ray.shutdown()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
