"""The remote back end keeps the promises of all: over HTTP, in front of the pretended one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from conformance_exec import ExecConformance
from conformance_files import FilesConformance
from conformance_life import LifeConformance
from conformance_sessions import SessionsConformance

from agentkit.sandboxes.backends.fake import FakeBackend
from agentkit.sandboxes.backends.remote import RemoteBackend
from agentkit.sandboxes.server import Service

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-tests-alone"


@pytest.fixture
async def backend() -> AsyncIterator[RemoteBackend]:
    fake = FakeBackend(create_seconds=0.02, call_seconds=0.0)
    async with Service(fake, token=TOKEN) as service:
        backend = RemoteBackend(service.url, TOKEN)
        await backend.start()
        yield backend
        assert fake.boxes == {}
        await backend.close()


class TestExec(ExecConformance):
    """Commands."""


class TestFiles(FilesConformance):
    """Files."""


class TestSessions(SessionsConformance):
    """Processes and shells."""


class TestLife(LifeConformance):
    """Making, changing, ending."""
