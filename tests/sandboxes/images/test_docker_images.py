"""Images without Python, without files and with volumes, and the source of the agent's Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import SMALL, WatchedDocker, make, sh, spec

from agentkit.errors import CommandNotFound, ImageError, UnsupportedFeature
from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.docker import options, runtime
from agentkit.sandboxes.spec import DEFAULT_IMAGE

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
async def derived(docker_backend: WatchedDocker, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Build an image from a Dockerfile, without a network; gone after the test."""
    built: list[str] = []

    async def derive(*lines: str) -> str:
        (tmp_path / "Dockerfile").write_text("\n".join(lines))
        tag = f"agentkit/test-{len(built)}-{paths.new_id()}"

        def job(client: Any) -> list[Any]:
            return list(
                client.build(path=str(tmp_path), tag=tag, rm=True, forcerm=True, network_mode="none", decode=True)
            )

        said = await docker_backend.engine.call("build", job, timeout=300, changes=True)
        assert not [message for message in said if "error" in message], said
        built.append(tag)
        return tag

    yield derive
    await docker_backend.clear()
    for tag in built:
        await docker_backend.engine.call(
            "remove", lambda client, tag=tag: client.remove_image(tag, force=True), changes=True
        )


@pytest.mark.parametrize(
    "damage",
    [
        "rm -f /usr/bin/python3*",
        r"printf '#!/bin/sh\nexit 127' > /usr/bin/python3",
        "rm -rf /usr/lib/python3* && echo /nowhere.so > /etc/ld.so.preload",
    ],
)
async def test_the_agent_is_independent_of_the_image(
    docker_backend: WatchedDocker, derived: Callable[..., Any], damage: str
) -> None:
    image = await derived(f"FROM {DEFAULT_IMAGE}", "USER 0", "ENV LD_PRELOAD=/no.so LD_DEBUG=", f"RUN {damage}")
    id, channel = await make(docker_backend, spec(image=image))
    said = await sh(channel, "echo hi; id -u; echo $LD_PRELOAD", env={"LC_ALL": "C"})
    assert said.stdout == "hi\n65534\n/no.so\n"
    await channel.write("/workspace/d/file", b"data", 0o644)
    parts = [part async for part in channel.pack(["/workspace"])]  # pyright: ignore[reportAttributeAccessIssue]
    again = await docker_backend.restart(id)
    await again.unpack(["/workspace"], pieces(parts))  # pyright: ignore[reportAttributeAccessIssue]
    assert (await sh(again, "cat /workspace/d/file; echo $LD_PRELOAD")).stdout == "data/no.so\n"


async def pieces(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_an_empty_image(docker_backend: WatchedDocker, derived: Callable[..., Any]) -> None:
    image = await derived("FROM scratch", "COPY Dockerfile /Dockerfile", 'CMD ["/none"]')
    _, channel = await make(docker_backend, spec(image=image))
    assert (await channel.read("/Dockerfile", 1000)).startswith(b"FROM scratch")
    await channel.write("/workspace/new", b"data", 0o600)
    assert [info.path for info in await channel.list("/workspace")] == ["/workspace/new"]
    with pytest.raises(CommandNotFound):
        await sh(channel, "true")


async def test_a_removed_or_incomplete_runtime_volume_is_filled_again(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = docker_backend._runtime
    monkeypatch.setattr(volume, "name", f"agentkit-test-{paths.new_id()}")
    engine = docker_backend.engine

    async def remove() -> None:
        await docker_backend.clear()
        await engine.call("remove", lambda client: client.remove_volume(volume.name), changes=True)

    made = await asyncio.gather(*(make(docker_backend) for _ in range(3)))
    assert [(await sh(channel, "echo hi")).stdout for _, channel in made] == ["hi\n"] * 3
    assert (await sh(made[0][1], "touch /agentkit/x /agentkit/agent/x")).exit_code == 1
    owners = (await sh(made[0][1], "find /agentkit ! -user 0 -o -perm /022 ! -type l")).stdout
    assert owners == ""
    await remove()  # and this process believes that it is there
    _, channel = await make(docker_backend)
    assert (await sh(channel, "echo hi")).stdout == "hi\n"
    await remove()
    await engine.call("create", lambda client: client.create_volume(volume.name), changes=True)
    other = WatchedDocker()  # which finds it empty
    await other.start()
    monkeypatch.setattr(other._runtime, "name", volume.name)
    _, channel = await make(other)
    assert (await sh(channel, "echo hi")).stdout == "hi\n"
    await other.clear()
    await other.close()
    await remove()


async def test_a_missing_runtime_image_is_an_error_with_the_remedy(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_backend._runtime, "name", f"agentkit-test-{paths.new_id()}")
    monkeypatch.setattr(runtime, "SOURCES", ("agentkit/none",))
    with pytest.raises(ImageError, match="agentkit sandbox build"):
        await make(docker_backend)


async def test_a_sandbox_of_another_version_can_only_be_removed(docker_backend: WatchedDocker) -> None:
    id = paths.new_id()
    docker_backend.asked.add(id)
    body = {
        "Image": DEFAULT_IMAGE,
        "Entrypoint": ["sleep", "1000"],
        "Labels": options.labels(id, SMALL, 1.0, {"agentkit.test": id}) | {options.DEFINITION: '{"image": 3}'},
    }

    def start(client: Any) -> None:
        client.create_container_from_config(body, name=id)
        client.start(id)

    await docker_backend.engine.call("create", start, changes=True)
    assert [(seen.id, seen.state) for seen in await docker_backend.list({"agentkit.test": id})] == [(id, "running")]
    for use in (docker_backend.attach, docker_backend.restart):
        with pytest.raises(UnsupportedFeature, match="another version of agentkit; remove it and create a new one"):
            await use(id)
    await docker_backend.remove(id)
    assert (await docker_backend.inspect(id)).state == "absent"


async def test_volumes_of_an_image_are_not_writable(docker_backend: WatchedDocker, derived: Callable[..., Any]) -> None:

    async def volumes() -> set[str]:
        found = await docker_backend.engine.call("volumes", lambda client: client.volumes(filters={"dangling": True}))
        return {volume["Name"] for volume in found["Volumes"] or ()}

    before = await volumes() | {docker_backend._runtime.name}
    image = await derived(
        f"FROM {DEFAULT_IMAGE}", "USER 0", "RUN mkdir -m 777 /data /workspace/x; echo kept > /data/file",
        "VOLUME /data", "VOLUME /workspace", "HEALTHCHECK CMD false", 'ENTRYPOINT ["/bin/false"]', "USER 0",
    )  # fmt: skip
    _, channel = await make(docker_backend, spec(image=image))
    assert (await sh(channel, "ls -A /data; touch /data/x; id -u; ls -A /workspace")).stdout == "65534\n"
    await sh(channel, "head -c 30000000 /dev/zero > /workspace/big")
    assert (await channel.stats()).workspace_size == SMALL.resources.workspace
    await docker_backend.clear()
    assert await volumes() <= before
