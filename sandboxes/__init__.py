"""Sandboxes: isolated, supervised places to run untrusted programs. Usable without the rest of agentkit.

    from agentkit.sandboxes import SyncSandbox

    with SyncSandbox.create() as box:
        print(box.exec("echo hi").stdout)

Importing this package is fast and loads no back end. Each name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkit.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend as Backend
    from agentkit.sandboxes.backend import Channel as Channel
    from agentkit.sandboxes.backend import Process as Process
    from agentkit.sandboxes.pool.breaker import Breaker as Breaker
    from agentkit.sandboxes.pool.health import HealthPolicy as HealthPolicy
    from agentkit.sandboxes.pool.pool import SandboxPool as SandboxPool
    from agentkit.sandboxes.recovery.hedge import Hedge as Hedge
    from agentkit.sandboxes.recovery.standby import Standbys as Standbys
    from agentkit.sandboxes.recovery.supervisor import Supervisor as Supervisor
    from agentkit.sandboxes.sandbox import Sandbox as Sandbox
    from agentkit.sandboxes.shell import Shell as Shell
    from agentkit.sandboxes.shell import ShellResult as ShellResult
    from agentkit.sandboxes.spec import Mount as Mount
    from agentkit.sandboxes.spec import Network as Network
    from agentkit.sandboxes.spec import Resources as Resources
    from agentkit.sandboxes.spec import SandboxSpec as SandboxSpec
    from agentkit.sandboxes.sync import SyncSandbox as SyncSandbox
    from agentkit.sandboxes.types import ExecResult as ExecResult
    from agentkit.sandboxes.types import FileInfo as FileInfo
    from agentkit.sandboxes.types import Observed as Observed
    from agentkit.sandboxes.types import SandboxInfo as SandboxInfo
    from agentkit.sandboxes.types import Snapshot as Snapshot
    from agentkit.sandboxes.types import Stats as Stats
    from agentkit.sandboxes.types import Transition as Transition

_MODULES = {
    name: f"agentkit.sandboxes.{module}"
    for module, names in {
        "backend": "Backend Channel Process",
        "pool.breaker": "Breaker",
        "pool.health": "HealthPolicy",
        "pool.pool": "SandboxPool",
        "recovery.hedge": "Hedge",
        "recovery.standby": "Standbys",
        "recovery.supervisor": "Supervisor",
        "sandbox": "Sandbox",
        "shell": "Shell ShellResult",
        "spec": "Mount Network Resources SandboxSpec",
        "sync": "SyncSandbox",
        "types": "ExecResult FileInfo Observed SandboxInfo Snapshot Stats Transition",
    }.items()
    for name in names.split()
}
"""Module of each public name. Invariant: the same names as in the block for type checkers above."""

if not TYPE_CHECKING:  # a type checker reports unknown names instead of giving them the type Any
    __all__ = list(_MODULES)
    __getattr__, __dir__ = lazy_exports(__name__, _MODULES)
