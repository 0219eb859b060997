"""Whose failure it is when a sandbox fails after untrusted code ran in it.

Invariant: the decision uses only what the host and the engine recorded. Nothing that a sandbox sends, no exit code and
no message, makes a failure external, so no program can excuse itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from agentkit.errors import (
    AccessDenied,
    EngineUnavailable,
    ImageError,
    InvalidTransition,
    LeaseExpired,
    PoolClosed,
    PoolExhausted,
    QuotaExceeded,
    SandboxLost,
    StartTimeout,
    UnsupportedFeature,
)

if TYPE_CHECKING:
    from agentkit.sandboxes.living import Living

Cause = Literal["external", "program", "unexplained"]
"""``external``: the host, the engine, or a request to it. ``program``: the code in the sandbox. ``unexplained``: the
code or bad luck; try once more, then hold the code responsible."""

_EXTERNAL_REASONS = frozenset({"removed", "engine_down", "replaced", "frozen", "closed"})
_PROGRAM_REASONS = frozenset({"oom", "tainted"})
_EXTERNAL_ERRORS = (
    AccessDenied,
    EngineUnavailable,
    ImageError,
    InvalidTransition,
    LeaseExpired,
    PoolClosed,
    PoolExhausted,
    QuotaExceeded,
    StartTimeout,
    UnsupportedFeature,
)


def decide(error: Exception, recorded: Mapping[str, Any]) -> Cause:
    """Attribute a failure.

    Args:
        error: what the call raised.
        recorded: what the engine knows of the sandbox's end (``Living.why_lost``); empty if it knows nothing.
    """
    if recorded.get("external") or isinstance(error, _EXTERNAL_ERRORS):
        return "external"
    if not isinstance(error, SandboxLost):
        return "unexplained"
    reasons = {error.details.get("reason"), recorded.get("reason")}
    if reasons & _EXTERNAL_REASONS:
        return "external"
    return "program" if reasons & _PROGRAM_REASONS else "unexplained"


async def cause_of(error: Exception, box: Living) -> Cause:
    """Attribute a failure of ``box``. Ask before you release or close it; takes at most 5 s."""
    return decide(error, {} if isinstance(error, _EXTERNAL_ERRORS) else await box.why_lost())
