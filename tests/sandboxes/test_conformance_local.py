"""The local back end keeps the promises of all, behind bubblewrap and behind name spaces of our own making."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from conformance_exec import ExecConformance
from conformance_files import FilesConformance
from conformance_life import LifeConformance
from conformance_sessions import SessionsConformance
from local_harness import WatchedLocal, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable
from agentkit.sandboxes import Backend

__all__ = ["runtime_directory"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_directory")]


@pytest.fixture(params=["bubblewrap", "namespaces"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    backend = WatchedLocal(request.param)
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"apt-get install bubblewrap, and let users make name spaces ({error})")
    yield backend
    await backend.close()
    assert backend.left() == []


class TestExec(ExecConformance):
    """Commands."""


class TestFiles(FilesConformance):
    """Files."""


class TestSessions(SessionsConformance):
    """Processes and shells."""


class TestLife(LifeConformance):
    """Making, changing, ending."""
