"""A sandbox that dies while it starts leaves nothing: no container, no directory, no record."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import SMALL, WatchedDocker
from local_harness import WatchedLocal, left_of, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable, SandboxError
from agentkit.sandboxes import Sandbox, paths
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.reaper import records
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.sandboxes.testing.faults import Fault

__all__ = ["runtime_directory"]

ATTACKS = ("kill -9 1", "kill -9 -1", "kill -TERM 1", "kill -9 $PPID", "kill -STOP $PPID; sleep 1; kill -9 -1; sleep 1")


@asynccontextmanager
async def started(backend: Backend) -> AsyncIterator[Backend]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def attacked(backend: Any, left: Any, phase: str, attack: str) -> None:
    """Start a sandbox that a command attacks from inside; whether it survives or not, nothing may be left."""
    fields = {phase: ("/bin/sh", "-c", f"{attack}; true"), "start_timeout": 10.0}
    try:
        box = await Sandbox.create(SMALL, backend=backend, **fields)
    except SandboxError:
        pass
    else:
        await box.close()
    assert await left() == []


async def killed_while_it_starts(backend: Any, left: Any, kill: Any, phase: str) -> None:
    """Start a sandbox and kill it from outside as soon as its first command runs."""
    fields: dict[str, Any] = {phase: ("sleep", "60")}
    creating = asyncio.ensure_future(Sandbox.create(SMALL, backend=backend, **fields))
    while not (ids := [one.id for one in await backend.list({}) if one.id in backend.asked]):
        await asyncio.sleep(0.1)
        assert not creating.done()
    await asyncio.sleep(1.5)
    await kill(ids[0])
    with pytest.raises(SandboxError):
        await asyncio.wait_for(creating, 60)
    assert await left() == []


def _records() -> list[str]:
    return [record.id for record in records.all_of()]


@pytest.mark.docker
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", ["setup", "ready"])
async def test_in_docker(docker_backend: WatchedDocker, phase: str) -> None:
    async def left() -> list[str]:
        return [*await docker_backend.left(), *_records()]

    async def kill(id: str) -> None:
        await docker_backend.engine.call("kill", lambda client: client.kill(id))

    await killed_while_it_starts(docker_backend, left, kill, phase)
    for attack in ATTACKS:
        await attacked(docker_backend, left, phase, attack)


@pytest.mark.parametrize("phase", ["setup", "ready"])
async def test_in_local_sandboxes(runtime_directory: Path, phase: str) -> None:
    backend = WatchedLocal()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, str(error))

    async def left() -> list[str]:
        return [entry for id in backend.asked for entry in left_of(id)]

    async def kill(id: str) -> None:
        state = local_state.load(id)
        assert state is not None
        os.kill(state.processes[-1].pid, signal.SIGKILL)

    try:
        await killed_while_it_starts(backend, left, kill, phase)
        for attack in ATTACKS:
            await attacked(backend, left, phase, attack)
    finally:
        for id in backend.asked:
            await backend.remove(id)
        await backend.close()


@pytest.mark.parametrize("does", ["die", "oom", "fail"])
@pytest.mark.parametrize("phase", ["setup", "ready"])
def test_in_scripted_sandboxes(does: Any, phase: str) -> None:
    async def main() -> None:
        async with started(FakeBackend(faults=[Fault("exec", does, seconds=0.05)])) as backend:
            fields: dict[str, Any] = {phase: ("sleep", "0.1")}
            with pytest.raises(SandboxError):
                await Sandbox.create(backend=backend, **fields)
            assert isinstance(backend, FakeBackend)
            assert backend.boxes == {}

    virtual_time.run(main(), limit=1000)


def test_death_and_cancellation_at_any_moment() -> None:
    async def main() -> None:
        async with started(FakeBackend()) as backend:
            assert isinstance(backend, FakeBackend)
            for dies in (0.1, 0.25, 0.3):
                for step in range(50):
                    task = asyncio.ensure_future(Sandbox.create(backend=backend, setup=("sleep", "0.1")))
                    loop = asyncio.get_running_loop()
                    loop.call_later(dies, lambda: [backend.die(id) for id in list(backend.boxes)])
                    loop.call_later(step * 0.01, task.cancel)
                    await asyncio.wait({task})
                    if not task.cancelled() and task.exception() is None:
                        await task.result().close()
                    assert backend.boxes == {}

    virtual_time.run(main(), limit=10_000)


@pytest.mark.docker
@pytest.mark.timeout(300)
async def test_the_reaper_removes_what_its_owner_could_not_remove(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await Sandbox.create(SMALL, backend=docker_backend)

    async def refuse(id: str) -> None:
        raise EngineUnavailable("the engine is away")

    with monkeypatch.context() as patch:
        patch.setattr(docker_backend, "remove", refuse)
        with pytest.raises(EngineUnavailable):
            await box.close()
    assert (await docker_backend.inspect(box.id)).state == "running"
    for _ in range(300):
        if (await docker_backend.inspect(box.id)).state == "absent" and not paths.record_path(box.id).exists():
            break
        await asyncio.sleep(0.1)
    assert [*await docker_backend.left(), *_records()] == []
    await box.close()
