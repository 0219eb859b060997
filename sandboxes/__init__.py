"""Sandboxes: isolated, supervised places to run what nobody should trust. Usable without the rest of agentkit.

    from agentkit.sandboxes import SyncSandbox

    with SyncSandbox.create() as box:
        print(box.exec("echo hi").stdout)

Invariant: importing this package is cheap and loads no back end; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES: dict[str, str] = {
    "Backend": "agentkit.sandboxes.backend",
    "Breaker": "agentkit.sandboxes.breaker",
    "Channel": "agentkit.sandboxes.backend",
    "ExecResult": "agentkit.sandboxes.types",
    "FileInfo": "agentkit.sandboxes.types",
    "HealthPolicy": "agentkit.sandboxes.health",
    "Hedge": "agentkit.sandboxes.hedge",
    "Mount": "agentkit.sandboxes.spec",
    "Network": "agentkit.sandboxes.spec",
    "Observed": "agentkit.sandboxes.types",
    "Process": "agentkit.sandboxes.backend",
    "Resources": "agentkit.sandboxes.spec",
    "Sandbox": "agentkit.sandboxes.sandbox",
    "SandboxInfo": "agentkit.sandboxes.types",
    "SandboxPool": "agentkit.sandboxes.pool",
    "SandboxSpec": "agentkit.sandboxes.spec",
    "Shell": "agentkit.sandboxes.shell",
    "ShellResult": "agentkit.sandboxes.shell",
    "Snapshot": "agentkit.sandboxes.types",
    "Standbys": "agentkit.sandboxes.redundancy",
    "Stats": "agentkit.sandboxes.types",
    "Supervisor": "agentkit.sandboxes.supervisor",
    "SyncSandbox": "agentkit.sandboxes.sync",
    "Transition": "agentkit.sandboxes.types",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentkit.sandboxes' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
