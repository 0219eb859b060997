"""The real learner and engine as actors, on one rank and on two, give the results of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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
from agentkit.trainers.cluster import place, reserve
from agentkit.trainers.inference.base import Sampling
from agentkit.types import Group, Trajectory, Turn

# A busy machine needs minutes to start Ray and the processes of its actors.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


def make_config(cluster: dict[str, Any] | None = None, **learner: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "env": {"id": "FrozenLake-v1"},
            "cluster": cluster,
            "rollout": {"groups": 4, "group_size": 3},
            "learner": {"lr": 1e-3, "threads": 1, "max_tokens": 256, "minibatches": 2, **learner},
            "engine": {"threads": 1, "max_batch": 16, "max_context": 128},
            "deterministic": True,
        }
    )


@asynccontextmanager
async def placed(factory: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    role = await place(factory, *args, **kwargs)
    try:
        await role.start()
        yield role
    finally:
        await role.close()


async def first_half(learner: Any, directory: Path) -> Tensors:
    """Imitate and train briefly, and save; return the first weights."""
    before = state_of(await learner.publish(0))
    await learner.imitate(make_batch(0), 1e-3)
    training = asyncio.create_task(learner.train(make_batch(1), 0))
    ticks = 0
    while not training.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 10, "the event loop was blocked"
    await training
    await learner.save(directory / "state")
    with pytest.raises(CheckpointError):
        await learner.load(directory / "nothing")
    return before


async def second_half(learner: Any, directory: Path) -> tuple[dict[str, float], Tensors]:
    """Train once more, publish and export; return metrics and weights."""
    metrics = await learner.train(make_batch(2), 1)
    published = await learner.publish(2)
    assert published.version == 2
    weights = state_of(published)
    await learner.export(directory / "model")
    exported = AutoModelForCausalLM.from_pretrained(directory / "model").state_dict()
    assert all(torch.equal(exported[key], weight) for key, weight in weights.items())
    return metrics, weights


async def in_this_process(directory: Path) -> tuple[Tensors, dict[str, float], Tensors]:
    """Return the first weights, and metrics and weights at the end of a learner that is never restarted."""
    async with placed(LEARNER, make_config()) as learner:
        before = await first_half(learner, directory)
        return before, *await second_half(learner, directory)


async def as_actors(directory: Path, **settings: Any) -> tuple[dict[str, float], Tensors]:
    """Return the same of a learner in actors that continues in new ones."""
    config = make_config({}, **settings)
    async with reserve(config) as slots:
        async with placed(LEARNER, config, slots=slots["learner"], name="learner") as learner:
            await first_half(learner, directory)
        async with placed(LEARNER, config, slots=slots["learner"], name="learner") as learner:
            await learner.load(directory / "state")
            return await second_half(learner, directory)


def folders(tmp_path: Path, names: Sequence[str]) -> list[Path]:
    for name in names:
        (tmp_path / name).mkdir()
    return [tmp_path / name for name in names]


async def test_an_actor_trains_and_continues_bit_for_bit(ray_cluster: Any, tmp_path: Path) -> None:
    here, there = folders(tmp_path, ["here", "there"])
    _, metrics, weights = await in_this_process(here)
    others, of_actor = await as_actors(there)
    assert others == pytest.approx(metrics, rel=0, abs=0, nan_ok=True)
    assert of_actor.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(of_actor[key], weight, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("backend", ["replicas", "fsdp"])
async def test_two_ranks_train_and_continue_as_one(ray_cluster: Any, tmp_path: Path, backend: str) -> None:
    here, there = folders(tmp_path, ["here", "there"])
    before, metrics, weights = await in_this_process(here)
    others, of_ranks = await as_actors(there, ranks=2, backend=backend)
    assert others == pytest.approx(metrics, rel=1e-3, abs=1e-5, nan_ok=True)
    # Adam turns the rounding of a gradient near zero into a step of full size, so single weights may differ.
    difference = sum(float((of_ranks[key] - weight).square().sum()) for key, weight in weights.items())
    update = sum(float((before[key] - weight).square().sum()) for key, weight in weights.items())
    print(f"difference of two ranks to one, as a share of the update: {(difference / update) ** 0.5:.2e}")
    assert (difference / update) ** 0.5 < 1e-2


@pytest.mark.parametrize("placement", ["inline", "actor"])
async def test_an_engine_behaves_the_same_in_both_placements(ray_cluster: Any, placement: str) -> None:
    prompt = np.arange(20, dtype=np.int32)
    config = make_config({} if placement == "actor" else None)
    async with (
        reserve(config) as slots,
        placed(ENGINE, config.model, config.engine, seed=5, slots=slots.get("engine"), name="engine") as engine,
    ):
        # Many more requests than slots.
        results = await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=4, seed=i), session=str(i)) for i in range(100))
        )
        assert all(len(result.ids) == len(result.logprobs) <= 4 for result in results)
        # An error keeps its type and ends its call alone.
        with pytest.raises(EngineError):
            await engine.generate(np.zeros(1000, np.int32), Sampling(max_tokens=4), session="long")
        # Cancelled calls free their slots.
        sampling = Sampling(max_tokens=108)
        calls = [asyncio.create_task(engine.generate(prompt, sampling, session=f"c{i}")) for i in range(40)]
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.wait_for(idle(engine), 10)
        # A pause ends what is under way, and holds back what comes.
        call = asyncio.create_task(engine.generate(prompt, sampling, session="p"))
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
