"""The pretended back end keeps the promises of all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from conformance_exec import ExecConformance
from conformance_files import FilesConformance
from conformance_life import LifeConformance
from conformance_sessions import SessionsConformance

from agentkit.sandboxes.backends.fake import FakeBackend


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(create_seconds=0.02, call_seconds=0.0)
    await backend.start()
    yield backend
    assert backend.boxes == {}
    await backend.close()


class TestExec(ExecConformance):
    """Commands."""


class TestFiles(FilesConformance):
    """Files."""


class TestSessions(SessionsConformance):
    """Processes and shells."""


class TestLife(LifeConformance):
    """Making, changing, ending."""
