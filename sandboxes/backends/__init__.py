"""Back ends by name, and one shared instance of each per event loop.

Invariant: looking up a name runs no code of its back end. A shared back end is started once, also for concurrent
borrowers, and closed when its last borrower has released it. The caller starts and closes an instance that it passes.
Third parties cannot use the name of a built-in back end.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.metadata
import weakref
from collections.abc import Awaitable, Callable

from agentkit.errors import ConfigError
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.tasks import finished, retrieve

GROUP = "agentkit.sandbox_backends"
"""The entry-point group of further back ends: ``name = package.module:Class``."""

BUILT_IN = {
    "docker": "agentkit.sandboxes.backends.docker.backend:DockerBackend",
    "local": "agentkit.sandboxes.backends.local.backend:LocalBackend",
    "remote": "agentkit.sandboxes.backends.remote.backend:RemoteBackend",
}

Release = Callable[[], Awaitable[None]]


def names() -> list[str]:
    """Return the names of all installed back ends."""
    return sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def check_backend(argument: str, which: object) -> None:
    """Raise ``ConfigError`` unless ``which``, the value of ``argument``, is a name or a ``Backend``."""
    if not isinstance(which, str | Backend):
        raise ConfigError(
            f"{argument}={which!r:.200} must be the name of a back end, such as 'docker', or a Backend that was started"
        )


def backend(which: str | Backend) -> Backend:
    """Return a new back end, which is not started; an instance is returned as it is.

    Args:
        which: a name, or ``"remote:URL,URL"`` for the back end ``remote`` with these servers.

    Raises:
        ConfigError: ``which`` is neither a name nor a back end, the name is unknown or claimed twice, or the code of
            the back end does not load.
    """
    check_backend("backend", which)
    if isinstance(which, Backend):
        return which
    name, colon, servers = which.partition(":")
    if colon and name != "remote":
        raise ConfigError(f"the sandbox back end {which!r} names servers, which only 'remote' has; use {name!r}")
    try:
        made = _class_of(name)(*([servers] if colon else []))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the sandbox back end {which!r} does not load: {type(error).__name__}: {error}") from error
    if not isinstance(made, Backend):
        raise ConfigError(f"the sandbox back end {which!r} is a {type(made).__name__}, not a Backend")
    return made


def _class_of(name: str) -> Callable[..., object]:
    points = list(importlib.metadata.entry_points(group=GROUP, name=name))
    if name in BUILT_IN:
        if points:
            raise ConfigError(f"the sandbox back end {name!r} is built in; rename {points[0].value}")
        return importlib.metadata.EntryPoint(name, BUILT_IN[name], GROUP).load()
    if not points:
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names())}"
        raise ConfigError(f"there is no sandbox back end {name!r}; {hint}")
    if len(points) > 1:
        claims = " and ".join(point.value for point in points)
        raise ConfigError(f"the sandbox back end {name!r} is claimed by {claims}; uninstall one of them")
    return points[0].load()


class _Shared:
    """A back end with the number of its borrowers."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.users = 0
        self.started = asyncio.ensure_future(backend.start())
        # Each borrower gets the error; asyncio must not log it when there is none.
        self.started.add_done_callback(retrieve)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]] = weakref.WeakKeyDictionary()


async def borrow(which: str | Backend) -> tuple[Backend, Release]:
    """Return a started back end and a function that releases it; further calls of the function have no effect.

    Raises:
        ConfigError: see ``backend``.
        EngineUnavailable: the back end cannot be started.
    """
    check_backend("backend", which)
    table = _shared.setdefault(asyncio.get_running_loop(), {})
    loan = contextlib.AsyncExitStack()
    if isinstance(which, Backend):
        known = next((name for name, shared in table.items() if shared.backend is which), None)
        if known is None:
            return which, loan.aclose
        which = known
    shared = table.get(which)
    if shared is None:
        shared = table[which] = _Shared(backend(which))
    shared.users += 1
    loan.push_async_callback(_release, table, which, shared)
    try:
        await asyncio.shield(shared.started)
    except BaseException:
        await loan.aclose()
        raise
    return shared.backend, loan.aclose


async def _release(table: dict[str, _Shared], name: str, shared: _Shared) -> None:
    shared.users -= 1
    if shared.users:
        return
    if table.get(name) is shared:
        del table[name]
    shared.started.cancel()
    await asyncio.wait({shared.started})
    await finished(shared.backend.close())
