"""Specific properties of the embedded engine: shared weights, determinism, failures of its thread, clean exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_conformance import policy, prompt_of, rescore

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Generation, Sampling
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.weights.base import Bucket, Receiver, Weights, WeightsInPlace
from agentkit.trainers.weights.shared_memory import SharedStaging

ENGINE = EngineConfig(max_batch=4, max_context=256)


class Engines:
    """Starts engines and closes them after the test."""

    def __init__(self) -> None:
        self.started: list[HFEngine] = []

    async def __call__(self, model: Any = None, **options: Any) -> HFEngine:
        engine = HFEngine(ModelConfig(device="cpu"), ENGINE, seed=0, model_object=model, **options)
        self.started.append(engine)
        await engine.start()
        return engine


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[Engines]:
    made = Engines()
    yield made
    for engine in made.started:
        await engine.close()


async def test_nothing_is_left_running(engines: Engines) -> None:
    before = set(threading.enumerate())
    engine = await engines()
    assert set(threading.enumerate()) > before
    await engine.generate(prompt_of(4), Sampling(3), session="a")
    await engine.close()
    assert set(threading.enumerate()) == before
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.stats()
    with pytest.raises(EngineError, match="new one"):
        await engine.start()


async def test_a_shared_model_is_served_in_place(engines: Engines) -> None:
    model = policy(1)
    model.train()
    engine = await engines(model)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    prompt = prompt_of(20)
    first = await engine.generate(prompt, Sampling(10), session="a")
    np.testing.assert_allclose(first.logprobs, rescore(model, prompt, first.ids), atol=1e-4)
    await engine.pause("abort")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert await engine.update_weights(WeightsInPlace(1)) == 1
    await engine.resume()
    second = await engine.generate(prompt, Sampling(10), session="a")
    assert second.versions == ((1, 10),)
    np.testing.assert_allclose(second.logprobs, rescore(model, prompt, second.ids), atol=1e-4)
    assert all(parameter.requires_grad for parameter in model.parameters())


async def test_deterministic_results_do_not_depend_on_other_requests(engines: Engines) -> None:
    engine = await engines(policy(2), deterministic=True)
    prompt = prompt_of(20)

    async def turn(session: str) -> Generation:
        return await engine.generate(prompt, Sampling(25, seed=7), session=session)

    alone = await turn("a")
    await engine.generate(prompt_of(9), Sampling(5), session="a")
    traffic = [engine.generate([*prompt, k], Sampling(9, seed=k), session=f"{k}") for k in range(5, 9)]
    for again in (await turn("a"), (await asyncio.gather(*traffic, turn("b")))[-1]):
        assert again.ids.tobytes() == alone.ids.tobytes()
        assert again.logprobs.tobytes() == alone.logprobs.tobytes()


async def test_equal_engines_give_equal_results(engines: Engines) -> None:
    async def results() -> list[list[int]]:
        engine = await engines(policy(2), deterministic=True)
        made = await asyncio.gather(*(engine.generate(prompt_of(k), Sampling(8), session=f"{k}") for k in range(3, 9)))
        return [got.ids.tolist() for got in made]

    assert await results() == await results()


async def test_a_failing_forward_pass_fails_every_call_and_hangs_none(engines: Engines) -> None:
    model = policy(3)
    engine = await engines(model)
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes > 5:
            raise MemoryError("no more")

    model.model.layers[1].register_forward_pre_hook(fail)
    calls = [engine.generate(prompt_of(k), Sampling(50), session=f"{k}") for k in range(2, 12)]
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert all(isinstance(result, EngineError) and "no more" in str(result) for result in results)
    for call in (engine.generate([5], Sampling(3), session="a"), engine.pause("keep"), engine.resume()):
        with pytest.raises(EngineError, match="no more"):
            await asyncio.wait_for(call, 5)
    assert (await engine.stats()).running == 0


async def test_weights_that_diverged_are_an_error_until_they_are_replaced(engines: Engines) -> None:
    model = policy(4)
    engine = await engines(model)
    weight = model.model.layers[0].self_attn.v_proj.weight
    sound = weight.detach().clone()
    for version, value in ((1, torch.full_like(sound, float("nan"))), (2, sound)):
        await engine.pause("abort")
        with torch.no_grad():
            weight.copy_(value)
        await engine.update_weights(WeightsInPlace(version))
        await engine.resume()
        # Long first, short then: what the long ones left in the rows must not leak into the short ones.
        prompts = [prompt_of(70 // version**2 + k) for k in range(6)]
        calls = [engine.generate(prompt, Sampling(6), session=f"{version}-{k}") for k, prompt in enumerate(prompts)]
        for prompt, result in zip(prompts, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if version == 1:
                assert isinstance(result, EngineError)
                assert "non-finite" in str(result)
            else:
                assert isinstance(result, Generation)
                np.testing.assert_allclose(result.logprobs, rescore(model, prompt, result.ids), atol=1e-4)


async def test_stop_strings_without_a_tokenizer_fail_alone() -> None:
    model = ModelConfig(path="./nothing-here", device="cpu")
    engine = HFEngine(model, ENGINE, seed=0, model_object=policy(5))
    await engine.start()
    try:
        with pytest.raises(EngineError, match="tokenizer"):
            await engine.generate(prompt_of(5), Sampling(5, stop_strings=("x",)), session="a")
        assert len((await engine.generate(prompt_of(5), Sampling(5), session="a")).ids) == 5
    finally:
        await engine.close()


async def test_an_unfinished_request_is_dropped_when_its_caller_times_out(engines: Engines) -> None:
    engine = await engines(policy(6))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(engine.generate(prompt_of(5), Sampling(240), session="a"), 0.02)
    await engine.generate(prompt_of(5), Sampling(1), session="b")
    stats = await engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.generated_tokens < 240


async def test_one_long_row_among_short_ones(engines: Engines) -> None:
    """Rows that are much longer than the rest attend in calls of their own."""
    model = policy(7)
    engine = await engines(model)
    long, short = prompt_of(200), prompt_of(6)
    prompts = [long, short, short, short, long[:150], short, short]
    results = await asyncio.gather(
        *(engine.generate(prompt, Sampling(40), session=f"{k}") for k, prompt in enumerate(prompts))
    )
    for prompt, got in zip(prompts, results, strict=True):
        np.testing.assert_allclose(got.logprobs, rescore(model, prompt, got.ids), atol=1e-4)


async def test_a_group_computes_its_prompt_once(engines: Engines) -> None:
    model = policy(1)
    engine = await engines(model)
    prompt = prompt_of(100)
    for group in range(2):
        before = await engine.stats()
        results = await asyncio.gather(
            *(engine.generate(prompt, Sampling(5 + k, seed=k), session=f"{group}.{k}") for k in range(11))
        )
        after = await engine.stats()
        for got in results:
            np.testing.assert_allclose(got.logprobs, rescore(model, prompt, got.ids), atol=1e-4)
        # One prompt, and its last token for each other member.
        assert after.prefilled_tokens - before.prefilled_tokens == 100 + 10
        assert after.reused_tokens - before.reused_tokens == 10 * 99
        await engine.pause("abort")
        await engine.update_weights(WeightsInPlace(group + 1))
        await engine.resume()


async def test_prompts_that_begin_alike_share_the_beginning(engines: Engines) -> None:
    model = policy(1)
    engine = await engines(model)
    rng = np.random.default_rng(0)
    system, tasks = prompt_of(40, seed=1), [prompt_of(30, seed=seed) for seed in range(2, 5)]
    prompts = [[*system, *tasks[k % 3], *prompt_of(int(rng.integers(1, 20)), seed=k)] for k in range(24)]
    results = await asyncio.gather(
        *(engine.generate(prompt, Sampling(8, seed=k), session=str(k)) for k, prompt in enumerate(prompts))
    )
    for prompt, got in zip(prompts, results, strict=True):
        np.testing.assert_allclose(got.logprobs, rescore(model, prompt, got.ids), atol=1e-4)
    stats = await engine.stats()
    assert stats.prefilled_tokens <= 40 + 3 * 30 + sum(len(prompt) - 70 for prompt in prompts)


async def test_a_deterministic_engine_reuses_nothing(engines: Engines) -> None:
    engine = await engines(policy(1), deterministic=True)
    await asyncio.gather(*(engine.generate(prompt_of(50), Sampling(4, seed=k), session=str(k)) for k in range(4)))
    stats = await engine.stats()
    assert (stats.prefilled_tokens, stats.reused_tokens) == (200, 0)


@dataclass(frozen=True)
class Vanishing(Weights):
    """Weights that are lost after ``arriving`` buckets."""

    whole: Weights | None = None
    arriving: int = 0

    def buckets(self, receiver: Receiver) -> Iterator[Bucket]:
        assert self.whole is not None
        for bucket in self.whole.buckets(receiver):
            for number, item in enumerate(bucket):
                if number == self.arriving:
                    raise EngineError("they are gone")
                yield [item]


async def test_weights_that_vanish_end_an_engine_only_if_some_were_loaded(engines: Engines) -> None:
    engine, staging = await engines(), SharedStaging()
    whole = staging.stage(3, [list(policy(8).state_dict().items())])
    prompt = prompt_of(9)
    before = await engine.generate(prompt, Sampling(6, seed=1), session="a")
    await engine.pause("abort")
    with pytest.raises(EngineError, match="gone") as refused:
        await engine.update_weights(Vanishing(3, whole.tensors, whole, arriving=0))
    assert not refused.value.fatal
    await engine.resume()
    after = await engine.generate(prompt, Sampling(6, seed=1), session="b")
    assert (after.ids.tolist(), after.versions) == (before.ids.tolist(), before.versions)
    await engine.pause("abort")
    with pytest.raises(EngineError, match="half-way") as lost:
        await engine.update_weights(Vanishing(3, whole.tensors, whole, arriving=5))
    assert lost.value.fatal
    for call in (engine.resume(), engine.generate(prompt, Sampling(6), session="a")):
        with pytest.raises(EngineError, match="half-way"):
            await call
    staging.release()
