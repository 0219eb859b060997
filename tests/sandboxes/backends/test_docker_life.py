"""The life cycle of sandboxes on a real engine."""

from __future__ import annotations

import asyncio
import time

import pytest
from docker_boxes import SMALL, WatchedDocker, make, sh, spec

from agentkit.errors import (
    InvalidTransition,
    SandboxError,
    SandboxLost,
)
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends.docker.engine import EngineRefused
from agentkit.sandboxes.spec import DEFAULT_IMAGE
from agentkit.sandboxes.types import BackendEvent

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


async def test_creation_inspection_and_removal(docker_backend: WatchedDocker) -> None:
    id = paths.new_id()
    channel = await docker_backend.create(id, SMALL, {"agentkit.test": "lifecycle"})
    seen = await docker_backend.inspect(id)
    assert (seen.state, seen.exit_code, seen.labels["agentkit.test"]) == ("running", None, "lifecycle")
    assert [(item.id, item.state) for item in await docker_backend.list({"agentkit.test": "lifecycle"})] == [
        (id, "running")
    ]
    assert await docker_backend.list({"agentkit.test": "other"}) == []
    assert channel.isolation == "container"

    await docker_backend.pause(id)
    assert (await docker_backend.inspect(id)).state == "paused"
    with pytest.raises(InvalidTransition):
        await docker_backend.pause(id)
    with pytest.raises(InvalidTransition):
        await docker_backend.attach(id)
    await docker_backend.resume(id)
    with pytest.raises(InvalidTransition):
        await docker_backend.resume(id)
    assert (await sh(channel, "echo on > /workspace/x; echo on")).stdout == "on\n"

    again = await docker_backend.restart(id)
    assert await asyncio.wait_for(channel.lost, 30) == "replaced"
    assert (await sh(again, "ls -A /workspace")).stdout == ""

    await docker_backend.remove(id)
    await docker_backend.remove(id)
    assert (await docker_backend.inspect(id)).state == "absent"
    await asyncio.wait_for(again.lost, 30)
    for gone in (docker_backend.pause, docker_backend.resume, docker_backend.restart, docker_backend.attach):
        with pytest.raises(SandboxLost):
            await gone(id)
    with pytest.raises(SandboxLost):
        await docker_backend.logs(id, 10)


async def test_a_paused_one_can_be_restarted_and_removed(docker_backend: WatchedDocker) -> None:
    id, _ = await make(docker_backend)
    await docker_backend.pause(id)
    assert (await sh(await docker_backend.restart(id), "echo on")).stdout == "on\n"
    await docker_backend.pause(id)
    await docker_backend.remove(id)


async def test_the_end_of_the_main_process(docker_box: tuple[str, Channel], docker_backend: WatchedDocker) -> None:
    id, channel = docker_box
    task = asyncio.ensure_future(sh(channel, "echo begun; sleep 1000"))
    await asyncio.sleep(1)
    await docker_backend.engine.call("kill", lambda client: client.kill(id))
    with pytest.raises(SandboxLost) as caught:
        await asyncio.wait_for(task, 60)
    assert caught.value.side_effects == "maybe"
    seen = await docker_backend.inspect(id)
    assert (seen.state, seen.exit_code) == ("exited", 137)
    listed = await docker_backend.list({"agentkit.test": "yes"})  # also those of tests that run beside this one
    assert [item.exit_code for item in listed if item.id == id] == [137]
    with pytest.raises(SandboxLost) as caught:
        await docker_backend.attach(id)
    assert (caught.value.details["reason"], caught.value.details["exit_code"]) == ("exited", 137)
    with pytest.raises(SandboxLost):
        await docker_backend.pause(id)
    assert (await sh(await docker_backend.restart(id), "echo on")).stdout == "on\n"


async def test_events_report_changes(docker_backend: WatchedDocker) -> None:
    seen: list[BackendEvent] = []

    async def listen() -> None:
        async for event in docker_backend.events():
            seen.append(event)

    task = asyncio.ensure_future(listen())
    await asyncio.sleep(1)
    id, _ = await make(docker_backend)
    await docker_backend.pause(id)
    await docker_backend.resume(id)
    await docker_backend.engine.call("kill", lambda client: client.kill(id))
    await docker_backend.remove(id)
    deadline = time.monotonic() + 60
    while BackendEvent(id, "removed") not in seen:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    ours = [event for event in seen if event.id == id]
    assert [event.kind for event in ours] == ["paused", "resumed", "died", "removed"]
    assert ours[2].exit_code == 137
    task.cancel()
    await asyncio.wait({task})


async def test_another_process_can_connect(docker_box: tuple[str, Channel], docker_backend: WatchedDocker) -> None:
    id, channel = docker_box
    other = WatchedDocker()
    await other.start()
    found, second = await other.attach(id)
    assert found == SMALL
    assert (await sh(second, "echo both")).stdout == "both\n"
    await second.close()
    await other.close()
    assert (await sh(channel, "echo still")).stdout == "still\n"


async def test_others_containers_are_not_touched(docker_backend: WatchedDocker) -> None:
    id = paths.new_id()
    config = {"Image": DEFAULT_IMAGE, "Cmd": ["sleep", "1000"], "Labels": {"agentkit.managed": "no"}}
    engine = docker_backend.engine
    await engine.call("create", lambda client: client.create_container_from_config(config, name=id), changes=True)
    try:
        assert (await docker_backend.inspect(id)).state == "absent"
        await docker_backend.remove(id)
        with pytest.raises(EngineRefused):
            await docker_backend.create(id, SMALL, {})
        with pytest.raises(SandboxLost):
            await docker_backend.attach(id)
        await engine.call("inspect", lambda client: client.inspect_container(id))
    finally:
        await engine.call("remove", lambda client: client.remove_container(id, force=True), changes=True)
        paths.remove_sandbox_directory(id)


@pytest.mark.parametrize("readonly_root", [True, False])
async def test_a_snapshot_is_put_back(docker_backend: WatchedDocker, readonly_root: bool) -> None:
    root = spec(readonly_root=readonly_root, user="0:0", cap_add=("DAC_OVERRIDE",))
    id, channel = await make(docker_backend, root)
    await sh(
        channel, "echo 1 > /workspace/a; mkdir -p /tmp/d; ln -s ../a /tmp/d/l; touch /etc/mark; chmod 750 /workspace/a"
    )
    snapshot = await docker_backend.snapshot(id, f"test-{id}")
    try:
        with pytest.raises(SandboxError, match="already"):
            await docker_backend.snapshot(id, f"test-{id}")
        await sh(channel, "echo 2 > /workspace/a; touch /workspace/later")
        other, second = await make(docker_backend, root.model_copy(update={"image": snapshot.image}))
        await docker_backend.restore(other, snapshot)
        look = "cat /workspace/a; ls -A /workspace; readlink /tmp/d/l; stat -c %a /workspace/a; ls /etc/mark"
        expected = "1\na\n../a\n750\n" + ("" if readonly_root else "/etc/mark\n")
        assert (await sh(second, look)).stdout == expected
        assert (await docker_backend.inspect(other)).labels["agentkit.id"] == other
    finally:
        await docker_backend.clear()
        await docker_backend.discard(snapshot)
    await docker_backend.discard(snapshot)
    assert list((paths.runtime_root() / "snapshots").iterdir()) == []
    images = await docker_backend.engine.call("images", lambda client: client.images("agentkit/snapshot"))
    assert images == []


@pytest.mark.slow
async def test_many_at_once(docker_backend: WatchedDocker) -> None:
    made = await asyncio.gather(*(make(docker_backend) for _ in range(6)))
    outputs = await asyncio.gather(*(sh(channel, f"echo {id}") for id, channel in made))
    assert [result.stdout.strip() for result in outputs] == [id for id, _ in made]
    await asyncio.gather(*(docker_backend.remove(id) for id, _ in made))
