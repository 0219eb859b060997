"""``async with Sandbox.create()``, ``await Sandbox.create()`` and tasks of it."""

from __future__ import annotations

import asyncio

import pytest

from agentkit.errors import SandboxLost
from agentkit.sandboxes import Sandbox


async def test_async_with_opens_and_removes() -> None:
    async with Sandbox.create(backend="local") as box:
        async with Sandbox.connect(box.id, backend="local") as connected:
            assert connected.id == box.id
        assert connected.state == "removed"
        async with box.shell() as shell, box.fork() as child:
            assert (await shell.run("echo hi")).stdout == "hi\n"
            assert child.id != box.id
        assert (child.state, box.state) == ("removed", "ready")
    assert box.state == "removed"


async def test_await_opens() -> None:
    box = await Sandbox.create(backend="local")
    async with box:
        assert box.state == "ready"
    assert box.state == "removed"


async def test_tasks_can_create_sandboxes() -> None:
    boxes = await asyncio.gather(asyncio.create_task(Sandbox.create(backend="local")), Sandbox.create(backend="local"))
    await asyncio.gather(*(box.close() for box in boxes))


async def test_an_error_is_raised_once_awaited() -> None:
    opening = Sandbox.connect("ak-0000000000000000", backend="local")
    with pytest.raises(SandboxLost):
        async with opening:
            pass


async def test_a_cancelled_task_opens_nothing() -> None:
    task = asyncio.create_task(Sandbox.create(backend="local", labels={"test": "cancelled"}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await Sandbox.list(labels={"test": "cancelled"}, backend="local") == []


def test_asyncio_run_accepts_it() -> None:
    with pytest.raises(SandboxLost):
        asyncio.run(Sandbox.connect("ak-0000000000000000", backend="local"))
