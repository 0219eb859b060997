"""The Docker back end keeps the promises of all."""

from __future__ import annotations

import pytest
from conformance_exec import ExecConformance
from conformance_files import FilesConformance
from conformance_life import LifeConformance
from conformance_sessions import SessionsConformance
from docker_boxes import WatchedDocker

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
async def backend(docker_backend: WatchedDocker) -> WatchedDocker:
    return docker_backend


class TestExec(ExecConformance):
    """Commands."""


class TestFiles(FilesConformance):
    """Files."""


class TestSessions(SessionsConformance):
    """Processes and shells."""


class TestLife(LifeConformance):
    """Making, changing, ending."""
