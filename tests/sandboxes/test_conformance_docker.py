"""The Docker back end keeps the promises of all: by the agent, and by the engine's own exec."""

from __future__ import annotations

import pytest
from conformance_exec import ExecConformance
from conformance_files import FilesConformance
from conformance_life import LifeConformance
from conformance_sessions import SessionsConformance
from docker_boxes import WatchedDocker

from agentkit.sandboxes.spec import DEFAULT_IMAGE, SandboxSpec

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=["agent", "exec"])
async def backend(request: pytest.FixtureRequest, docker_backend: WatchedDocker) -> WatchedDocker:
    if request.param == "exec":
        image = await docker_backend._images.ensure(SandboxSpec(image=DEFAULT_IMAGE))
        docker_backend._without_python.add(image.id)
    return docker_backend


class TestExec(ExecConformance):
    """Commands."""


class TestFiles(FilesConformance):
    """Files."""


class TestSessions(SessionsConformance):
    """Processes and shells."""


class TestLife(LifeConformance):
    """Making, changing, ending."""
