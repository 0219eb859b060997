"""A snapshot goes with its owner, but not before the last sandbox that was made from it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import WatchedDocker, spec
from local_harness import WatchedLocal
from requiring import require

from agentkit.errors import EngineUnavailable
from agentkit.sandboxes import Sandbox, paths
from agentkit.sandboxes.reaper.sweep import sweep
from agentkit.sandboxes.types import Snapshot

OWNER = """
import asyncio, json, sys
from dataclasses import asdict
from agentkit.sandboxes import Sandbox, SandboxSpec
from agentkit.sandboxes.spec import Resources

async def main(kind, readonly_root):
    spec = SandboxSpec(
        resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64),
        readonly_root=readonly_root,
    )
    box = await Sandbox.create(spec, backend=kind)
    await box.files.write("kept", "yes")
    print(json.dumps([asdict(await box.snapshot()), asdict(await box.snapshot("custom-" + box.id))]), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main(sys.argv[1], sys.argv[2] == "readonly"))
"""


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[WatchedDocker | WatchedLocal]:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "agentkit"))
    made = WatchedLocal() if request.param == "local" else WatchedDocker()
    try:
        await made.start()
    except EngineUnavailable as error:
        require(False, str(error))
    yield made
    await made.close()


async def left(engine: Any, names: list[str]) -> set[str]:
    """Return what is left of snapshots: archives, notes, images."""
    folder = paths.runtime_root() / "snapshots"
    files = {path.name for path in folder.iterdir()} if folder.exists() else set()
    found = {file for file in files if any(name in file for name in names)}
    if isinstance(engine, WatchedDocker):
        images = await engine.engine.call(
            "images", lambda client: client.images(filters={"label": ["agentkit.snapshot"]})
        )
        owners = [json.loads(image["Labels"]["agentkit.snapshot"]) for image in images]
        found |= {owner["agentkit.id"] for owner in owners if owner["agentkit.id"] in names}
    return found


async def until(condition: Any, what: str) -> None:
    for _ in range(600):
        if await condition():
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not in a minute: {what}")


@pytest.mark.timeout(400)
async def test_snapshots_of_a_killed_owner_are_removed(engine: Any) -> None:
    root = "writable" if isinstance(engine, WatchedDocker) else "readonly"
    process = subprocess.Popen([sys.executable, "-c", OWNER, engine.name, root], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert process.stdout is not None
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        used, unused = (Snapshot(**fields) for fields in json.loads(line))
        names = [used.id, unused.id]
        assert {one.id for one in await engine.snapshots()} >= set(names)
        fields = {"readonly_root": root == "readonly"}
        async with Sandbox.create(spec(**fields), backend=engine, snapshot=used) as box:
            assert (await sweep(engine)).removed == {}, "its owner lives"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

            async def only_used_is_left() -> bool:
                return bool(await left(engine, [used.id])) and not await left(engine, [unused.id])

            await until(only_used_is_left, "the snapshot that is not used is gone")
            await sweep(engine)
            await box.reset()
            assert await box.files.read("kept") == b"yes", "what was made from it still has what it needs"
        await sweep(engine)
        assert await left(engine, names) == set()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.docker
@pytest.mark.timeout(400)
async def test_an_image_that_is_discarded_while_it_is_used_goes_afterwards(
    docker_backend: WatchedDocker,
) -> None:
    async with Sandbox.create(spec(readonly_root=False), backend=docker_backend) as box:
        snapshot = await box.snapshot()
        async with Sandbox.create(spec(readonly_root=False), backend=docker_backend, snapshot=snapshot) as other:
            await Sandbox.discard(snapshot, backend=docker_backend)
            assert (await other.exec("true")).ok
            assert await left(docker_backend, [snapshot.id])
        await sweep(docker_backend)
        assert await left(docker_backend, [snapshot.id]) == set()
