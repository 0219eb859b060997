"""Fixtures of tests on a real container engine, which check that a test leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from docker_boxes import SMALL, WatchedDocker
from requiring import require

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

pytest.register_assert_rewrite("pool_cases", "sandbox_cases", "simulation")

REMEDY = "run `PYTHON=.venv/bin/python .ci/docker`: it installs and starts an engine, and builds the base image"


@pytest.fixture
async def docker_backend(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[WatchedDocker]:
    """A started Docker back end. Sandboxes that a test leaves behind are removed and fail the test."""
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
    """The id and the channel of a small sandbox."""
    id = paths.new_id()
    yield id, await docker_backend.create(id, SMALL, {"agentkit.test": "yes"})
    await docker_backend.remove(id)
