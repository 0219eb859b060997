"""The embedded engine against the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from engine_conformance import ENGINE, EngineConformance, Served, save_policy

from agentkit.trainers.inference.hf import HFEngine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Awaitable[Served]]]:
    directory = tmp_path_factory.mktemp("policy")
    model = save_policy(directory, seed=0)
    engines: list[HFEngine] = []

    async def start() -> Served:
        engines.append(HFEngine(model, ENGINE, seed=0))
        await engines[-1].start()
        return Served(engines[-1])

    yield start
    for engine in engines:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(make: Callable[[], Awaitable[Served]]) -> Served:
    return await make()


class TestHFEngine(EngineConformance):
    pass
