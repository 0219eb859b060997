"""The remote back end passes the conformance tests, with a server of local sandboxes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from local_harness import WatchedLocal, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.testing.conformance import BackendConformance

__all__ = ["runtime_directory"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_directory")]
TOKEN = "a-token-of-the-tests-alone"


@pytest.fixture
async def backend() -> AsyncIterator[RemoteBackend]:
    local = WatchedLocal()
    async with contextlib.AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(SandboxServer(local, token=TOKEN))
        except EngineUnavailable as error:
            require(False, f"apt-get install bubblewrap, and let users make name spaces ({error})")
            raise
        backend = RemoteBackend(server.url, TOKEN)
        await backend.start()
        yield backend
        assert await local.list({}) == []
        await backend.close()
    assert local.left() == []


class TestRemote(BackendConformance):
    """Local sandboxes behind HTTP."""
