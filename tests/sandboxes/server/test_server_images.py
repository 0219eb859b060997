"""Images of a sandbox server: fetched ahead, and removed when they are no longer used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requiring import require

from agentkit.envs.isolation.env import _check_image, _describe
from agentkit.envs.isolation.placement import place
from agentkit.errors import AccessDenied, ImageError, QuotaExceeded
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends.docker.backend import DockerBackend
from agentkit.sandboxes.backends.docker.engine import make_client
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.config import ImageConfig, ServerConfig
from agentkit.sandboxes.server.images import unused
from agentkit.sandboxes.server.policy import Policy
from agentkit.sandboxes.testing.fake import FakeBackend

TOKEN = "a-token-of-the-tests-alone"
PATIENCE = 30.0
SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))
AT_ONCE = 1e-6
"""Days that are over at once."""


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def served(backend: Backend, images: ImageConfig, allowed: str = "*") -> AsyncIterator[SandboxServer]:
    config = ServerConfig(policy=Policy(images=(allowed,)), images=images)
    async with SandboxServer(backend, token=TOKEN, config=config) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(*servers: SandboxServer) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend([server.url for server in servers], TOKEN)
    await backend.start()
    yield backend
    await backend.close()


def using(image: str) -> SandboxSpec:
    return SMALL.model_copy(update={"image": image})


# Decisions

NAMES = st.sampled_from(["listed", "kept/a", "kept/b", "x", "y", "z"])


@given(st.dictionaries(NAMES, st.floats(0, 30)), st.sets(NAMES), st.floats(0, 1))
def test_only_unused_images_are_removed(ages: dict[str, float], in_use: set[str], disk: float) -> None:
    config = ImageConfig(pull=("listed",), keep=("kept/*",), keep_days=14.0, max_disk=0.8)
    now = 1e9
    chosen = unused({name: now - age * 86400 for name, age in ages.items()}, in_use, config, now, disk)
    assert not {"listed", "kept/a", "kept/b", *in_use} & set(chosen)
    assert all(disk >= 0.8 or ages[name] >= 14.0 for name in chosen)
    assert [ages[name] for name in chosen] == sorted((ages[name] for name in chosen), reverse=True)
    free = ages.keys() & {"x", "y", "z"} - in_use
    assert {name for name in free if disk >= 0.8 or ages[name] > 14.1} <= set(chosen)


def test_nothing_is_removed_by_default() -> None:
    assert unused({"x": 0.0}, (), ImageConfig(), 1e9, 1.0) == []


# A server


async def test_listed_images_are_fetched_and_unused_ones_removed() -> None:
    fake = FakeBackend(create_seconds=0.01)
    fake.images.add("of-others")
    images = ImageConfig(pull=("listed",), keep_days=AT_ONCE, interval=0.1)
    async with served(fake, images) as server, connected(server) as backend:
        await until(lambda: "listed" in fake.images)
        async with Sandbox.create(using("used"), backend=backend), Sandbox.create(using("of-others"), backend=backend):
            await asyncio.sleep(0.5)
            assert fake.images == {"listed", "of-others", "used"}
        await until(lambda: "used" not in fake.images)
        await asyncio.sleep(0.3)
        assert fake.images == {"listed", "of-others"}


async def test_an_image_is_fetched_on_all_servers() -> None:
    one, two = FakeBackend(), FakeBackend()
    images = ImageConfig()
    async with (
        served(one, images, "team/*") as first,
        served(two, images, "team/*") as second,
        connected(first, second) as backend,
    ):
        assert await backend.pull("team/image")
        assert (one.images, two.images) == ({"team/image"}, {"team/image"})
        assert not await backend.pull("team/image")
        with pytest.raises(AccessDenied, match="image"):
            await backend.pull("evil/image")
        first.tenants.drain(True)
        with pytest.raises(QuotaExceeded):
            await backend.pull("team/other")


async def test_a_run_needs_its_image_on_all_servers_that_accept_sandboxes() -> None:
    class Without(FakeBackend):
        async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
            raise ImageError(f"no image {image!r}", image=image)

    one, two = FakeBackend(), Without()
    async with (
        served(one, ImageConfig()) as first,
        served(two, ImageConfig()) as second,
        connected(first, second) as backend,
    ):
        with pytest.raises(ImageError, match=f"{second.url}: no image 'agentkit/env'"):
            await _describe(place("FrozenLake-v1", {}, backend))
        spec = using("agentkit/env")
        first.tenants.drain(True)
        await until(lambda: [host.state for host in backend.hosts()] == ["unschedulable", "up"])
        with pytest.raises(ImageError, match=f"{second.url}: no image 'agentkit/env'"):
            await Sandbox.create(spec, backend=backend)
        with pytest.raises(ImageError):  # the refusal of the other server does not hide it
            await _check_image(backend, spec)
        first.tenants.drain(False)
        second.tenants.drain(True)
        await _check_image(backend, spec)
        assert one.images == {"agentkit/env"}


# A real registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Run a registry on loopback, which engines trust without TLS; yield its address."""
    program = shutil.which("docker-registry")
    require(program is not None, "apt-get install docker-registry")
    assert program is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = tmp_path / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path}}}}}\n"
        f"http: {{addr: '{address}'}}\n"
    )
    process = subprocess.Popen(
        [program, "serve", str(config)], env={**os.environ, "OTEL_TRACES_EXPORTER": "none"}, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + PATIENCE
    while socket.socket().connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)
    yield address
    process.terminate()
    process.wait(PATIENCE)


@pytest.mark.docker
async def test_images_of_a_registry_come_and_go(registry: str) -> None:
    name = f"{registry}/tests/image:1"
    client = make_client()
    client.tag("agentkit/base", f"{registry}/tests/image", "1")
    try:
        assert "error" not in str(client.push(f"{registry}/tests/image", "1"))
    finally:
        client.remove_image(name)
    base = client.inspect_image("agentkit/base")["Id"]

    def present() -> bool:
        return any(name in (image["RepoTags"] or ()) for image in client.images())

    images = ImageConfig(keep_days=AT_ONCE, interval=0.5)
    try:
        async with served(DockerBackend(), images) as server, connected(server) as backend:
            async with Sandbox.create(using(name), backend=backend) as box:
                assert (await box.exec("echo fetched")).stdout == "fetched\n"
                await asyncio.sleep(1.5)
                assert present()
            await until(lambda: not present())
            with pytest.raises(ImageError):
                await backend.pull(f"{registry}/tests/none:1")
            assert await backend.pull(name)
            await until(lambda: not present())
            assert client.inspect_image("agentkit/base")["Id"] == base
    finally:
        if present():
            client.remove_image(name)
        client.close()
