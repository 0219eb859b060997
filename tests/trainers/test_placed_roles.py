"""The real learner and engine give equal results in this process, in a spawned process, and on two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from weights_reading import state_of

from agentkit.config import RunConfig
from agentkit.errors import CheckpointError, EngineError
from agentkit.trainers.batch import Batch, flatten
from agentkit.trainers.cluster import place
from agentkit.trainers.inference.base import Generation, Sampling
from agentkit.trainers.models.load import load_policy
from agentkit.trainers.weights.base import Weights
from agentkit.trainers.weights.shared_memory import SharedStaging
from agentkit.types import Group, Trajectory, Turn

pytestmark = pytest.mark.timeout(600)  # every process imports torch, which takes its time on a busy machine

Tensors = dict[str, torch.Tensor]

LEARNER = "agentkit.trainers.learner.torch_learner:Learner"
ENGINE = "agentkit.trainers.inference.hf:HFEngine"


def make_batch(seed: int, *, groups: int = 4, size: int = 3) -> Batch:
    """Episodes of unequal lengths with made-up rewards and log-probabilities near those of an untrained policy."""
    rng = np.random.default_rng(seed)

    def turn(index: int) -> Turn:
        number = int(rng.integers(1, 9))
        return Turn(
            prompt_ids=rng.integers(0, 300, int(rng.integers(3, 20))).astype(np.int32),
            action_ids=rng.integers(0, 300, number).astype(np.int32),
            action_logprobs=rng.normal(-6.0, 0.1, number).astype(np.float32),
            versions=((0, number),),
            reward=float(rng.normal()),
        )

    return flatten(
        [
            Group(
                group,
                seed,
                0,
                [
                    Trajectory(group, member, "Test-v0", seed, 0, [turn(i) for i in range(int(rng.integers(1, 4)))])
                    for member in range(size)
                ],
            )
            for group in range(groups)
        ]
    )


def make_config(**learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"id": "FrozenLake-v1"},
            "rollout": {"groups": 4, "group_size": 3},
            "learner": {"lr": 1e-3, "threads": 1, "max_tokens": 256, "minibatches": 2, **learner},
            "engine": {"threads": 1, "max_batch": 16, "max_context": 128},
            "deterministic": True,
        }
    )


@asynccontextmanager
async def placed(factory: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    role: Any = await place(factory, *args, threads=1, **kwargs)
    try:
        await role.start()
        yield role
    finally:
        await role.close()


@pytest.fixture(autouse=True)
def same_threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


async def outcome(
    directory: Path, *, resume: bool = False, **placement: Any
) -> tuple[dict[str, float], Tensors, Tensors]:
    """Imitate and train briefly, with an optional save and load; return metrics, weights before and weights after."""
    directory.mkdir()  # noqa: ASYNC240
    config = make_config(**placement)
    kwargs = {"placement": config.learner.placement, "ranks": config.learner.ranks}
    metrics: dict[str, float] = {}
    after: Tensors = {}
    async with placed(LEARNER, config, **kwargs) as learner:
        before = state_of(await learner.publish(0))
        await learner.imitate(make_batch(0), 1e-3)
        training = asyncio.create_task(learner.train(make_batch(1), 0))
        ticks = 0
        while not training.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks > 10, "the event loop was blocked"
        await training
        if resume:
            await learner.save(directory / "state")
        else:
            metrics = await learner.train(make_batch(2), 1)
            after = await read(learner)
            await learner.export(directory / "model")
            exported = AutoModelForCausalLM.from_pretrained(directory / "model").state_dict()
            assert all(torch.equal(exported[key], weight) for key, weight in after.items())
        with pytest.raises(CheckpointError):
            await learner.load(directory / "nothing")
    if resume:
        async with placed(LEARNER, config, **kwargs) as learner:
            await learner.load(directory / "state")
            metrics = await learner.train(make_batch(2), 1)
            after = await read(learner)
    return metrics, before, after


async def read(learner: Any) -> Tensors:
    published = await learner.publish(2)
    assert published.version == 2
    return state_of(published)


async def check_same_in_a_process(directory: Path, **options: Any) -> None:
    metrics, _, weights = await outcome(directory / "inline")
    others, _, of_process = await outcome(directory / "process", placement="process", **options)
    assert others == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
    assert of_process.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(of_process[key], weight, rtol=0, atol=0, msg=key)


async def check_two_ranks_equal_one(directory: Path, **options: Any) -> None:
    metrics, before, weights = await outcome(directory / "one")
    others, _, of_ranks = await outcome(directory / "two", placement="process", ranks=2, **options)
    assert others == pytest.approx(metrics, rel=1e-3, abs=1e-5, nan_ok=True)
    # Adam turns the rounding of a gradient near zero into a step of full size, so single weights may differ.
    difference = sum(float((of_ranks[key] - weight).square().sum()) for key, weight in weights.items())
    update = sum(float((before[key] - weight).square().sum()) for key, weight in weights.items())
    print(f"difference of two ranks to one, as a share of the update: {(difference / update) ** 0.5:.2e}")
    assert (difference / update) ** 0.5 < 1e-2


async def test_a_learner_trains_the_same_in_a_process(tmp_path: Path) -> None:
    await check_same_in_a_process(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["replicas", "fsdp"])
async def test_two_ranks_train_as_one(tmp_path: Path, backend: str) -> None:
    await check_two_ranks_equal_one(tmp_path, backend=backend)


@pytest.mark.slow
async def test_resuming_changes_nothing_in_any_placement(tmp_path: Path) -> None:
    for check in (check_same_in_a_process, check_two_ranks_equal_one):
        (tmp_path / check.__name__).mkdir()
        await check(tmp_path / check.__name__, resume=True)


def placed_engine(placement: str, *, deterministic: bool) -> Any:
    config = make_config()
    return placed(ENGINE, config.model, config.engine, seed=5, deterministic=deterministic, placement=placement)


def other_weights(staging: SharedStaging, version: int) -> Weights:
    policy = load_policy(make_config().model, seed=77)
    return staging.stage(version, [list(policy.state_dict().items())])


async def play(engine: Any, weights: Weights) -> list[Generation]:
    """Run seeded requests of several sessions concurrently, before and after a change of weights."""
    results: list[Generation] = []
    prompts = np.random.default_rng(4).integers(0, 300, (12, 20)).astype(np.int32)
    for version in (0, 3):
        if version:
            await engine.pause("abort")
            assert await engine.update_weights(weights) == version
            await engine.resume()
        results += await asyncio.gather(
            *(
                engine.generate(prompt[: 5 + i], Sampling(max_tokens=10, seed=100 + i), session=f"s{i}")
                for i, prompt in enumerate(prompts)
            )
        )
    return results


@pytest.mark.slow
async def test_an_engine_generates_the_same_in_a_process() -> None:
    staging = SharedStaging()
    weights = other_weights(staging, 3)
    results = []
    for placement in ("inline", "process"):
        async with placed_engine(placement, deterministic=True) as engine:
            results.append(await play(engine, weights))
    staging.release()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert (one.versions, one.finish_reason) == (other.versions, other.finish_reason)
    assert {version for result in results[1] for version, _ in result.versions} == {0, 3}
    first, second = results[1][:12], results[1][12:]
    assert any(not np.array_equal(a.ids, b.ids) for a, b in zip(first, second, strict=True)), "weights did not change"


@pytest.mark.parametrize("placement", ["inline", "process"])
async def test_an_engine_behaves_the_same_in_every_placement(placement: str) -> None:
    prompt = np.arange(20, dtype=np.int32)
    async with placed_engine(placement, deterministic=False) as engine:
        # Many more requests than slots.
        results = await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=4, seed=i), session=str(i)) for i in range(100))
        )
        assert all(len(result.ids) == len(result.logprobs) <= 4 for result in results)
        # An error keeps its type and ends its call alone.
        with pytest.raises(EngineError):
            await engine.generate(np.zeros(1000, np.int32), Sampling(max_tokens=4), session="long")
        # Cancelled calls free their slots.
        calls = [
            asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=108), session=f"c{i}")) for i in range(40)
        ]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.wait_for(idle(engine), 10)
        # A pause ends what is under way, and holds back what comes.
        call = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=108), session="p"))
        while (await engine.stats()).running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await engine.pause("abort")
        assert (await asyncio.wait_for(call, 5)).finish_reason == "abort"
        call = asyncio.create_task(engine.generate(prompt, Sampling(max_tokens=2), session="p"))
        await asyncio.sleep(0.05)
        assert not call.done()
        await engine.resume()
        assert len((await asyncio.wait_for(call, 10)).ids) <= 2


async def idle(engine: Any) -> None:
    while True:
        stats = await engine.stats()
        if stats.running == stats.waiting == 0:
            return
        await asyncio.sleep(0.01)
