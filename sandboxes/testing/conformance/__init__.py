"""The specification of a sandbox back end as executable tests.

A back end conforms if it passes these tests. Run them against your own back end with pytest and pytest-asyncio::

    import pytest_asyncio
    from agentkit.sandboxes.testing.conformance import BackendConformance
    from my_package import MyBackend

    @pytest_asyncio.fixture
    async def backend():
        backend = MyBackend()
        await backend.start()
        yield backend
        await backend.close()

    class TestMyBackend(BackendConformance):
        pass

The fixture ``backend`` yields a started back end. The sandboxes need ``sh`` and the usual small commands (``cat``,
``head``, ``sleep``, …). A test is skipped if the back end refuses what it needs with ``UnsupportedFeature``. A back
end that needs an image takes the default image; override the fixture ``create`` of the class to use another one.

``ExecConformance``, ``FilesConformance``, ``LifecycleConformance`` and ``SessionsConformance`` contain the tests of one
part each.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{part}" for part in ("exec", "files", "fixtures", "lifecycle", "sessions"))
)

from agentkit.sandboxes.testing.conformance.exec import ExecConformance  # noqa: E402
from agentkit.sandboxes.testing.conformance.files import FilesConformance  # noqa: E402
from agentkit.sandboxes.testing.conformance.lifecycle import LifecycleConformance  # noqa: E402
from agentkit.sandboxes.testing.conformance.sessions import SessionsConformance  # noqa: E402

__all__ = [
    "BackendConformance",
    "ExecConformance",
    "FilesConformance",
    "LifecycleConformance",
    "SessionsConformance",
]


class BackendConformance(ExecConformance, FilesConformance, LifecycleConformance, SessionsConformance):
    """All conformance tests."""
