"""The router over two embedded engines passes the conformance suite of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from engine_conformance import ENGINE, EngineConformance, Served, save_policy

from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.inference.router import Replica, Router


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Awaitable[Served]]]:
    directory = tmp_path_factory.mktemp("policy")
    model = save_policy(directory, seed=0)
    engines: list[HFEngine] = []

    async def start() -> Served:
        router = Router(2)
        for index in range(2):
            engines.append(HFEngine(model, ENGINE, seed=index))
            await engines[-1].start()
            await router.join(Replica(index, engines[-1]))
        return Served(router)

    yield start
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(make: Callable[[], Awaitable[Served]]) -> Served:
    return await make()


class TestRouter(EngineConformance):
    pass
