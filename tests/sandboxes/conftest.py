"""What tests of sandboxes share: a real container engine, watched for what a test leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from docker_boxes import SMALL, WatchedDocker
from requiring import require

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

REMEDY = "run `PYTHON=.venv/bin/python .ci/docker`: it installs and starts an engine, and builds the base image"


@pytest.fixture
async def docker_backend(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[WatchedDocker]:
    """A started Docker back end. What a test leaves behind is removed, and fails it."""
    require("docker", "pip install 'agentkit-rl[docker]'")
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime") / "agentkit"))
    backend = WatchedDocker()
    try:
        await backend.start()
        await backend._images.ensure(SandboxSpec(image=DEFAULT_IMAGE))
    except (EngineUnavailable, ImageError) as error:
        await backend.close()
        require(False, f"{REMEDY} ({error})")
    try:
        yield backend
        left = await backend.left()
        await backend.clear()
        assert left == [], "the test left sandboxes behind"
    finally:
        await backend.clear()
        await backend.close()


@pytest.fixture
async def docker_box(docker_backend: WatchedDocker) -> AsyncIterator[tuple[str, Channel]]:
    """A small sandbox: its id, and its channel."""
    id = paths.new_id()
    yield id, await docker_backend.create(id, SMALL, {"agentkit.test": "yes"})
    await docker_backend.remove(id)
