"""Find out from the engine why a sandbox ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from agentkit.errors import EngineUnavailable, SandboxError
from agentkit.sandboxes.backend import Backend

SETTLE_TIME = 0.5
"""Seconds after which a sandbox whose connection ended counts as running, if the engine still reports so."""
DIAGNOSIS_TIMEOUT = 5.0
"""Seconds that the engine gets to report."""
_POLL_INTERVAL = 0.05
_LOG_TAIL = 50


async def diagnose(backend: Backend, id: str) -> dict[str, Any]:
    """Return what the engine recorded about the end of sandbox ``id``. Takes at most ``DIAGNOSIS_TIMEOUT`` seconds.

    Returns:
        ``reason`` and ``exit_code`` as in ``SandboxLost``; ``external``: whether the host, the engine or a request to
        it ended the sandbox; ``log_tail``: the last lines of the main process. Empty if the engine knows nothing.
    """
    try:
        return await asyncio.wait_for(_recorded_end(backend, id), DIAGNOSIS_TIMEOUT)
    except EngineUnavailable:
        return {"external": True}
    except (SandboxError, asyncio.TimeoutError):
        return {}


async def _recorded_end(backend: Backend, id: str) -> dict[str, Any]:
    now = asyncio.get_running_loop().time
    end = now() + SETTLE_TIME
    while (observed := await backend.inspect(id)).state == "running":
        if now() >= end:
            return {}
        await asyncio.sleep(_POLL_INTERVAL)
    if observed.state != "exited":
        return {"reason": "frozen" if observed.state == "paused" else "removed", "external": True}
    log = b""
    with contextlib.suppress(SandboxError):  # it may be removed at this moment
        log = await backend.logs(id, _LOG_TAIL)
    return {
        "reason": "oom" if observed.oom_killed else "exited",
        "exit_code": observed.exit_code,
        "external": observed.external,
        "log_tail": log.decode("utf-8", "replace"),
    }
