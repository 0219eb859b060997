"""Back ends by name, and one shared instance of each for every event loop.

Invariant: knowing a name runs no code of its back end. A shared back end is started once, however many ask for it at
the same time, and closed when the last who borrowed it has given it back; one that the caller made is the caller's to
start and to close. A third party cannot take the name of a built-in one.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.metadata
import weakref
from collections.abc import Awaitable, Callable

from agentkit.errors import ConfigError
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend

GROUP = "agentkit.sandbox_backends"
"""The entry-point group of further back ends: ``name = package.module:Class``."""

BUILT_IN = {
    "docker": "agentkit.sandboxes.backends.docker:DockerBackend",
    "fake": "agentkit.sandboxes.backends.fake:FakeBackend",
    "local": "agentkit.sandboxes.backends.local:LocalBackend",
    "remote": "agentkit.sandboxes.backends.remote:RemoteBackend",
}

Release = Callable[[], Awaitable[None]]


def names() -> list[str]:
    """All back ends that can be asked for by name."""
    return sorted({*BUILT_IN, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def backend(which: str | Backend) -> Backend:
    """A new back end of this name, not started yet; an instance is returned as it is.

    Raises ``ConfigError`` for a name that is unknown, claimed twice, or whose code does not load.
    """
    if isinstance(which, Backend):
        return which
    try:
        made = _class_of(which)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the sandbox back end {which!r} does not load: {type(error).__name__}: {error}") from error
    if not isinstance(made, Backend):
        raise ConfigError(f"the sandbox back end {which!r} is a {type(made).__name__}, not a Backend")
    return made


def _class_of(name: str) -> Callable[[], object]:
    points = list(importlib.metadata.entry_points(group=GROUP, name=name))
    if name in BUILT_IN:
        if points:
            raise ConfigError(f"the sandbox back end {name!r} is built in; {points[0].value} must be called otherwise")
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if not points:
        near = difflib.get_close_matches(name, names(), 1)
        raise ConfigError(
            f"there is no sandbox back end {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names())}")
        )
    if len(points) > 1:
        claims = " and ".join(point.value for point in points)
        raise ConfigError(f"the sandbox back end {name!r} is claimed by {claims}; uninstall one of them")
    return points[0].load()


class _Shared:
    """A back end that several users of one event loop have together."""

    def __init__(self, made: Backend) -> None:
        self.backend = made
        self.users = 0
        self.started = asyncio.ensure_future(made.start())
        # Each borrower sees the error; without any left nobody does, and nobody needs to.
        self.started.add_done_callback(lambda task: task.cancelled() or task.exception())


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]] = weakref.WeakKeyDictionary()


async def borrow(which: str | Backend) -> tuple[Backend, Release]:
    """A started back end and what gives it back. Raises ``ConfigError``, ``EngineUnavailable``."""
    table = _shared.setdefault(asyncio.get_running_loop(), {})
    if isinstance(which, Backend):
        known = next((name for name, shared in table.items() if shared.backend is which), None)
        if known is None:
            return which, _nothing
        which = known
    shared = table.get(which)
    if shared is None:
        shared = table[which] = _Shared(backend(which))
    shared.users += 1
    release = _releaser(table, which, shared)
    try:
        await asyncio.shield(shared.started)
    except BaseException:
        await release()
        raise
    return shared.backend, release


def _releaser(table: dict[str, _Shared], name: str, shared: _Shared) -> Release:
    given_back = False

    async def release() -> None:
        nonlocal given_back
        if given_back:
            return
        given_back = True
        shared.users -= 1
        if shared.users:
            return
        if table.get(name) is shared:
            del table[name]
        shared.started.cancel()
        await asyncio.wait({shared.started})
        await finished(shared.backend.close())

    return release


async def _nothing() -> None:
    """The caller's own back end is given back to nobody."""
