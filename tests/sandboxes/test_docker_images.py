"""Images without Python, without anything, and with volumes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from docker_boxes import SMALL, WatchedDocker, make, sh, spec

from agentkit.errors import (
    ImageError,
    SandboxLost,
)
from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.docker_exec import DockerExecChannel
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    ["rm -f /usr/bin/python3*", "rm -rf /usr/lib/python3*", r"printf '#!/bin/sh\nexit 127' > /usr/bin/python3"],
)
async def test_without_python_the_engine_is_the_way_in(
    docker_backend: WatchedDocker, derived: Callable[..., Any], damage: str
) -> None:
    image = await derived(f"FROM {DEFAULT_IMAGE}", "USER 0", f"RUN {damage}")
    id, channel = await make(docker_backend, spec(image=image))
    assert isinstance(channel, DockerExecChannel)
    assert (await sh(channel, "echo hi; id -u")).stdout == "hi\n65534\n"
    found, second = await docker_backend.attach(id)
    assert found.image == image
    assert (await sh(second, "echo two")).stdout == "two\n"
    await second.close()
    task = asyncio.ensure_future(sh(channel, "sleep 1000"))
    await asyncio.sleep(1)
    await docker_backend.engine.call("kill", lambda client: client.kill(id))
    with pytest.raises(SandboxLost) as caught:
        await asyncio.wait_for(task, 60)
    assert caught.value.details["reason"] == "exited"
    assert await asyncio.wait_for(channel.lost, 60) == "exited"
    again = await docker_backend.restart(id)
    assert (await sh(again, "echo on")).stdout == "on\n"


async def test_an_image_with_nothing_in_it(docker_backend: WatchedDocker, derived: Callable[..., Any]) -> None:
    image = await derived("FROM scratch", "COPY Dockerfile /Dockerfile", 'CMD ["/none"]')
    with pytest.raises(ImageError, match="neither Python"):
        await make(docker_backend, spec(image=image))


async def test_volumes_of_an_image_are_no_way_out(docker_backend: WatchedDocker, derived: Callable[..., Any]) -> None:
    image = await derived(
        f"FROM {DEFAULT_IMAGE}", "USER 0", "RUN mkdir -m 777 /data /workspace/x; echo kept > /data/file",
        "VOLUME /data", "VOLUME /workspace", "HEALTHCHECK CMD false", 'ENTRYPOINT ["/bin/false"]', "USER 0",
    )  # fmt: skip
    _, channel = await make(docker_backend, spec(image=image))
    assert (await sh(channel, "ls -A /data; touch /data/x; id -u; ls -A /workspace")).stdout == "65534\n"
    await sh(channel, "head -c 30000000 /dev/zero > /workspace/big")
    assert (await channel.stats()).workspace_size == SMALL.resources.workspace
    await docker_backend.clear()
    volumes = await docker_backend.engine.call("volumes", lambda client: client.volumes(filters={"dangling": True}))
    assert not volumes["Volumes"]
