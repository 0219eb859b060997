"""The Docker back end passes the conformance tests."""

from __future__ import annotations

import pytest
from docker_boxes import WatchedDocker

from agentkit.sandboxes.testing.conformance import BackendConformance

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
async def backend(docker_backend: WatchedDocker) -> WatchedDocker:
    return docker_backend


class TestDocker(BackendConformance):
    """Containers of the engine on this machine."""
