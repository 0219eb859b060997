"""Weights that reach the real vLLM: sent by the learner, equal to the learner's, and found out if they are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import pytest_asyncio
from engine_conformance import ENGINE, Served, policy, prompt_of, save_policy, session
from requiring import require

from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.router import Replica, Router
from agentkit.trainers.inference.vllm import VLLMEngine
from agentkit.trainers.weights.base import Weights
from agentkit.trainers.weights.sender import Sender
from agentkit.trainers.weights.sent import SentWeights, Wire

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

REMEDY = "run .ci/vllm, which makes an environment with vLLM and runs these tests in it"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[VLLMEngine]]:
    """One engine with the weights of policy 0, and one with those of policy 1."""
    require("vllm", REMEDY)
    models = [save_policy(tmp_path_factory.mktemp("policy"), seed=seed) for seed in (0, 1)]
    engines = [VLLMEngine(model, ENGINE.model_copy(update={"threads": 1}), seed=0) for model in models]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        yield engines
    finally:
        for engine in engines:
            await engine.close()


class Learner:
    """Sends the weights of ``policy(version)`` as version ``version``, in buckets of some tensors."""

    def __init__(self, wire: Wire) -> None:
        self.sender = Sender(wire, rank=0, ranks=1, device="cpu", workers=1)
        self.thread = ThreadPoolExecutor(1)

    def buckets(self, version: int) -> Any:
        items = list(policy(version).state_dict().items())
        return iter([items[start : start + 5] for start in range(0, len(items), 5)])

    def publish(self, version: int) -> Weights:
        return self.sender.stage(version, self.buckets(version))

    async def send(self, weights: SentWeights) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, self.sender.send, weights, lambda: self.buckets(weights.version))

    def close(self) -> None:
        self.sender.release()
        self.thread.shutdown()


@pytest.mark.parametrize(("wire", "versions"), [("gloo", (1, 2)), ("ipc", (3, 4))])
async def test_engines_serve_exactly_what_the_learner_sends(
    engines: list[VLLMEngine], wire: Wire, versions: tuple[int, ...]
) -> None:
    learner, prompt = Learner(wire), prompt_of(20)
    router = Router(2, send=learner.send, verify=True)
    for index, engine in enumerate(engines):
        await router.join(Replica(index, engine))
    served = Served(engines[0], {version: policy(version) for version in range(versions[-1] + 1)}, versions[0] - 1)
    in_flight = asyncio.ensure_future(engines[0].generate(prompt, Sampling(150, seed=1), session=session()))
    loaded = await engines[1].checksum()  # at first of policy 1, which vLLM itself loaded
    for version in versions:
        await asyncio.sleep(0.05)
        await router.pause("keep")
        assert await router.update_weights(learner.publish(version)) == version
        await router.resume()
        assert len(router.live) == 2
        assert {await engine.checksum() for engine in engines} == {await router.checksum()}
        served.version = version
        served.check(prompt, await router.generate(prompt, Sampling(9, temperature=0), session=session()))
        if version == 1:
            assert await router.checksum() == loaded
    served.check(prompt, await in_flight)
    learner.close()


async def test_a_sleeping_engine_wakes_with_the_next_weights(engines: list[VLLMEngine]) -> None:
    """On CPUs vLLM only notes that it sleeps; the calls are those of a GPU."""
    engine, learner = engines[0], Learner("gloo")
    with pytest.raises(EngineError, match="pause"):
        await engine.sleep()
    await engine.pause("abort")
    await engine.sleep()
    assert await engine._llm.engine_core.call_utility_async("is_sleeping")
    weights = learner.publish(5).for_engines(1)
    assert isinstance(weights, SentWeights)
    await asyncio.gather(engine.update_weights(weights), learner.send(weights))
    waiting = asyncio.ensure_future(engine.generate(prompt_of(5), Sampling(4), session=session()))
    await asyncio.sleep(0.5)
    assert not waiting.done()  # awake, but still paused
    await engine.resume()
    Served(engine, {5: policy(5)}, 5).check(prompt_of(5), await waiting)
    learner.close()


async def test_an_engine_with_corrupt_weights_is_expelled(engines: list[VLLMEngine]) -> None:
    """Runs last, because it breaks an engine."""
    learner = Learner("gloo")
    router = Router(2, send=learner.send, verify=True)
    for index, engine in enumerate(engines):
        await router.join(Replica(index, engine))
    await router.pause("abort")
    await router.update_weights(learner.publish(6))
    await router.resume()
    assert len(router.live) == 2
    corrupt, right = engines[1], await router.checksum()
    joining = Replica(1, corrupt)
    router.expel(router.live[1], EngineError("its machine rebooted", fatal=True))
    update = corrupt.update_weights

    async def update_wrongly(weights: Weights) -> int:
        version = await update(weights)
        await corrupt._llm.collective_rpc("reset_weights")  # vLLM's own: all weights are zero
        return version

    corrupt.update_weights = update_wrongly  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="other weights"):
        await router.join(joining)
    corrupt.update_weights = update  # type: ignore[method-assign]
    await router.join(Replica(1, corrupt))
    assert await corrupt.checksum() == right
    learner.close()
