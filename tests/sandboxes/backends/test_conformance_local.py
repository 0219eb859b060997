"""The local back end passes the conformance tests, with bubblewrap and with its own namespaces."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from local_harness import WatchedLocal, runtime_directory
from requiring import require

from agentkit.errors import EngineUnavailable, FileTooLarge
from agentkit.sandboxes import Backend, Resources
from agentkit.sandboxes.testing.conformance import BackendConformance
from agentkit.sandboxes.testing.conformance.fixtures import Create

__all__ = ["runtime_directory"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_directory")]

TREES = """
import os
for _ in range(1990):
    os.mkdir("deep" if os.getcwd() == "/workspace" else "d")
    os.chdir("deep" if os.getcwd() == "/workspace" else "d")
os.chdir("/workspace")
os.mkdir("wide")
for number in range(100_001):
    os.mknod(f"wide/{number}")
os.mkdir("large")
for number in range(20):
    with open(f"large/{number}", "w") as file:
        file.truncate(60 << 20)  # sparse
print("made")
"""


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


class TestLocal(BackendConformance):
    """Processes of this machine behind namespaces."""

    async def test_trees_of_any_shape_end_with_an_error_soon(self, create: Create, tmp_path: Path) -> None:
        box = await create(resources=Resources(memory=1 << 30, workspace=256 << 20))
        result = await box.exec(["python3", "-c", TREES], timeout=100)
        assert result.stdout == "made\n", result.stderr
        for name, problem in (("deep", "directories deep"), ("wide", "100000 entries"), ("large", "bytes")):
            begin = time.monotonic()
            with pytest.raises(FileTooLarge, match=problem):
                await box.files.download(name, tmp_path / name)
            assert time.monotonic() - begin < 20
            assert not (tmp_path / name).exists()
        assert (await box.exec("echo on")).stdout == "on\n"
