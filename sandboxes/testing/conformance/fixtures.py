"""Fixtures and bounds of the conformance tests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes import Backend, Resources, Sandbox, SandboxSpec

SMALL = SandboxSpec(
    resources=Resources(memory=64 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64), exec_timeout=30
)
SLACK = 10.0
"""Seconds that a busy machine may add to a time bound."""

Create = Callable[..., Awaitable[Sandbox]]


async def until(condition: Callable[[], Awaitable[Any]], timeout: float = 20.0) -> None:
    """Wait until ``condition`` holds; fail after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < end, f"the condition does not hold after {timeout:g} s"
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def optional() -> Iterator[None]:
    """Skip the test if the body raises ``UnsupportedFeature``."""
    try:
        yield
    except UnsupportedFeature as refusal:
        pytest.skip(f"not supported: {refusal}")


class SandboxFixtures:
    """Fixtures that make sandboxes on the fixture ``backend`` and check that they are removed."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture
    async def create(self, backend: Backend) -> AsyncIterator[Create]:
        """Like ``Sandbox.create``, with small resources."""
        created: list[Sandbox] = []

        async def create(**fields: Any) -> Sandbox:
            created.append(await Sandbox.create(**{"spec": SMALL, **fields}, backend=backend))
            return created[-1]

        yield create
        for box in created:
            await box.close()
        for box in created:
            assert (await backend.inspect(box.id)).state == "absent"

    @pytest_asyncio.fixture
    async def box(self, create: Create) -> Sandbox:
        """One small sandbox."""
        return await create()
