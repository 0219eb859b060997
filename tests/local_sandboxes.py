"""The sandboxes of the local back end in this runtime directory."""

from __future__ import annotations

from requiring import require

from agentkit.errors import EngineUnavailable
from agentkit.sandboxes.backends.local.backend import LocalBackend


async def local_sandboxes() -> int:
    """Return the number of sandboxes; skip the test if they cannot run here."""
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    found = len(await backend.list({}))
    await backend.close()
    return found
