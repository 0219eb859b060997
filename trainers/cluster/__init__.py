"""Placement of roles: in this process, or as actors of a Ray cluster.

Invariant: a role behaves the same under both placements. Its public coroutine methods can be awaited by thousands of
tasks at once, cancelled, and fail with the same ``AgentkitError``; an actor adds only ``RoleError``: its process died
or hangs, or the role raised another type of error. Placed roles end with the caller.

``place`` and ``reserve`` are the entry points. Only roles in actors import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pkgutil
import socket
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from agentkit.config import RunConfig
from agentkit.extras import require_ray

if TYPE_CHECKING:
    from agentkit.trainers.cluster.placement import Slot


@contextlib.asynccontextmanager
async def reserve(config: RunConfig) -> AsyncIterator[dict[str, tuple[Slot, ...]]]:
    """Reserve the places of all processes in the cluster of ``config``; yield them by role (none without a cluster).

    Raises:
        ConfigError: the cluster cannot be reached or lacks resources.
        MissingExtra: Ray is not installed.
    """
    if config.cluster is None:
        yield {}
        return
    require_ray()
    from agentkit.trainers.cluster.ray_cluster import reserve

    async with reserve(config) as slots:
        yield slots


async def have_places(slots: Sequence[Slot] | None) -> bool:
    """Return whether the nodes of reserved places live; True outside a cluster.

    The places of a lost node are moved to others as soon as these have room.
    """
    if slots is None:
        return True
    from agentkit.trainers.cluster.ray_cluster import have_places

    return await asyncio.to_thread(have_places, slots)


async def place(
    factory: str, *args: Any, slots: Sequence[Slot] | None = None, name: str = "role", **kwargs: Any
) -> Any:
    """Construct ``factory(*args, **kwargs)`` here or in actors; return an object with its coroutine methods.

    Without ``slots``: the role itself, in this process.

    With ``slots``: a proxy of the role in one actor per slot. Arguments and results must pickle (large numpy arrays are
    not copied into the pickle and must not change until the call returns). Cancelling a call cancels the coroutine in
    the actor and does not wait for its clean-up. The actors end when this process ends in any way; keep its event loop
    alive as long as the role. The proxy has only the coroutine methods. Its ``close`` awaits the role's ``close`` and
    ends the actors; it is idempotent.

    With several slots, each process is constructed with ``rank=``, ``world_size=`` and ``init_method=`` (an address for
    ``torch.distributed``), every call goes to all of them at once and returns rank 0's result. An error in any rank
    ends the whole group, after a few seconds for the others, and is raised by the call; later calls raise
    ``RoleError``.

    Args:
        factory: name of a class or function, as ``"package.module:name"``; only the process of the role imports it.
        slots: reserved places, one per rank (``reserve``).
        name: names the role in messages.

    Raises:
        RoleError: the actors could not be started, or the constructor raised. An ``AgentkitError`` of the constructor
            is raised unchanged.
    """
    if slots is None:
        return pkgutil.resolve_name(factory)(*args, **kwargs)
    from agentkit.trainers.cluster.ranks import RemoteRole

    proxy = RemoteRole(name, len(slots))
    await proxy._launch(slots, factory, args, kwargs)
    return proxy


def processes(role: Any, slots: Sequence[Slot] | None) -> list[tuple[str, int]]:
    """Return host and process id of each process of a role that ``place`` returned, by rank."""
    return [(socket.gethostname(), os.getpid())] if slots is None else role.processes
