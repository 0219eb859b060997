"""Placement of roles: in this process, or as actors of a Ray cluster.

Invariant: a role behaves the same under every placement. Its public coroutine methods can be awaited by thousands of
tasks at once, cancelled, and fail with the same ``AgentkitError``; a placement adds only ``RoleError``: a process
died or hangs, or the role raised another type of error. Placed roles end with the caller.

``place`` and ``reserve`` are the entry points. Only roles in actors import Ray.
"""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from agentkit.config import RunConfig
from agentkit.errors import ConfigError
from agentkit.extras import require_ray

if TYPE_CHECKING:
    from agentkit.trainers.cluster.placement import Slot

RoleT = TypeVar("RoleT")


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


async def place(
    factory: Callable[..., RoleT] | str,
    *args: Any,
    slots: Sequence[Slot] | None = None,
    placement: Literal["inline", "process"] = "inline",
    ranks: int = 1,
    threads: int | None = None,
    name: str = "role",
    start_timeout: float = 600.0,
    call_timeout: float | None = None,
    silence_timeout: float = 60.0,
    **kwargs: Any,
) -> RoleT:
    """Construct ``factory(*args, **kwargs)`` here or in actors; return an object with its coroutine methods.

    ``factory`` is a class or function, or its name ``"package.module:name"``; only the process of the role imports it.

    Without ``slots``: the role itself, in this process.

    With ``slots``: a proxy of the role in one actor per slot. ``factory`` must be importable by name on every node,
    arguments and results must pickle (large numpy arrays are not copied into the pickle and must not change until the
    call returns). Cancelling a call cancels the coroutine in the actor and does not wait for its clean-up. The actors
    end when this process ends in any way; keep its event loop alive as long as the role. The proxy has only the
    coroutine methods. Its ``close`` awaits the role's ``close`` and ends the actors; it is idempotent.

    With several slots, each process is constructed with ``rank=``, ``world_size=`` and ``init_method=`` (an address for
    ``torch.distributed``), every call goes to all of them at once and returns rank 0's result. An error in any rank
    ends the whole group, after a few seconds for the others, and is raised by the call; later calls raise
    ``RoleError``.

    Args:
        slots: reserved places, one per rank (``reserve``).
        threads: CPU threads of torch and of numerical libraries. In an actor: set in its environment before imports.
            Inline: torch's threads of this whole process; the last role placed decides.
        name: names the role in messages.
        start_timeout: seconds for starting the actors, importing and constructing the role.
        call_timeout: seconds after which a call that has not ended counts as hung: its actor is killed and all its
            calls raise ``RoleError``. ``None``: calls may take any time.
        silence_timeout: seconds for which the event loop of an actor may be blocked before the actor counts as hung.

    Raises:
        ConfigError: a factory that cannot be imported by name.
        RoleError: the actors could not be started, or the constructor raised. An ``AgentkitError`` of the constructor
            is raised unchanged.
    """
    if slots is None and placement == "process":
        from agentkit.trainers.cluster import spawned

        limits = {"start_timeout": start_timeout, "call_timeout": call_timeout}
        return await spawned.place(
            factory, *args, placement="process", ranks=ranks, threads=threads, name=name, **limits, **kwargs
        )
    if slots is None:
        if ranks != 1:
            raise ConfigError(f"{name}: {ranks} ranks need placement 'process' or a cluster: each rank is a process")
        _set_threads(threads)
        role = (pkgutil.resolve_name(factory) if isinstance(factory, str) else factory)(*args, **kwargs)
        _set_threads(threads)  # the constructor may have imported torch
        return role
    _check_importable(factory, name)
    from agentkit.trainers.cluster.ranks import RemoteRole

    proxy = RemoteRole(name, len(slots), call_timeout=call_timeout, silence_timeout=silence_timeout)
    await proxy._launch(slots, factory, args, kwargs, threads, start_timeout)
    return cast(RoleT, proxy)


def _set_threads(threads: int | None) -> None:
    torch = sys.modules.get("torch")
    if threads is not None and torch is not None:
        torch.set_num_threads(threads)


def _check_importable(factory: Callable[..., Any] | str, name: str) -> None:
    if isinstance(factory, str):
        return  # the process that imports it reports errors
    module, path = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if module is None or path is None or module == "__main__" or "<" in path or inspect.ismethod(factory):
        raise ConfigError(
            f"{name}: {factory!r} cannot be imported by name in another process; use a class or function at the top "
            "level of a module other than the main script"
        )
