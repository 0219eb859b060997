"""What every back end must do, in executable form: the specification of ``agentkit.sandboxes.backend``.

A test module derives from the classes here and provides the fixture ``backend``, a started back end. The sandboxes
need ``sh`` and the usual small commands, nothing more. What a back end refuses as ``UnsupportedFeature`` is skipped;
what it accepts it must do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes import Backend, Resources, Sandbox, SandboxSpec

SMALL = SandboxSpec(
    resources=Resources(memory=64 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64), exec_timeout=30
)
SLACK = 10.0
"""Seconds that a busy machine may add before a bound counts as broken."""

Create = Callable[..., Awaitable[Sandbox]]


async def until(condition: Callable[[], Awaitable[Any]], timeout: float = 20.0) -> None:
    """Wait until it holds, or fail."""
    end = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def optional() -> Any:
    """What a back end may refuse, in so many words."""
    try:
        yield
    except UnsupportedFeature as refusal:
        pytest.skip(f"refused: {refusal}")


class Conformance:
    """The fixtures of all cases."""

    @pytest.fixture
    async def create(self, backend: Backend) -> AsyncIterator[Create]:
        made: list[Sandbox] = []

        async def create(**fields: Any) -> Sandbox:
            fields = {"spec": SMALL, **fields}
            box = await Sandbox.create(backend=backend, **fields)
            made.append(box)
            return box

        yield create
        for box in made:
            await box.close()
        for box in made:
            if box._owned:
                assert (await backend.inspect(box.id)).state == "absent"

    @pytest.fixture
    async def box(self, create: Create) -> Sandbox:
        return await create()
