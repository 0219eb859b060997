"""Attribute the failure of a sandbox in which untrusted code ran.

Invariant: the decision uses only records of the host and the engine. No data from the sandbox, neither an exit code nor
a message, makes a failure external, so a program cannot excuse itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from agentkit.errors import (
    AccessDenied,
    EngineUnavailable,
    ImageError,
    InvalidTransition,
    PoolClosed,
    PoolExhausted,
    QuotaExceeded,
    SandboxExpired,
    SandboxLost,
    StartTimeout,
    UnsupportedFeature,
)

if TYPE_CHECKING:
    from agentkit.sandboxes.sandbox import Sandbox

Cause = Literal["external", "program", "unexplained"]
"""``external``: the host, the engine, or a request to it. ``program``: the code in the sandbox. ``unexplained``:
one of the two; retry once, then count the failure as the program's."""

_EXTERNAL_REASONS = frozenset({"removed", "engine_down", "replaced", "frozen", "closed"})
_PROGRAM_REASONS = frozenset({"oom", "tainted"})
_EXTERNAL_ERRORS = (
    AccessDenied,
    EngineUnavailable,
    ImageError,
    InvalidTransition,
    SandboxExpired,
    PoolClosed,
    PoolExhausted,
    QuotaExceeded,
    StartTimeout,
    UnsupportedFeature,
)


def decide(error: Exception, recorded: Mapping[str, Any]) -> Cause:
    """Attribute a failure.

    Args:
        error: the error of the call.
        recorded: the engine's record of the end of the sandbox (``Sandbox.why_lost``); empty if it has none.
    """
    if recorded.get("external") or isinstance(error, _EXTERNAL_ERRORS):
        return "external"
    if not isinstance(error, SandboxLost):
        return "unexplained"
    reasons = {error.details.get("reason"), recorded.get("reason")}
    if reasons & _EXTERNAL_REASONS:
        return "external"
    return "program" if reasons & _PROGRAM_REASONS else "unexplained"


async def cause_of(error: Exception, box: Sandbox) -> Cause:
    """Attribute a failure of ``box``, in at most 5 s. Call this before the sandbox is released or closed."""
    return decide(error, {} if isinstance(error, _EXTERNAL_ERRORS) else await box.why_lost())
