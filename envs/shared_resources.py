"""Resources that the environments of a process share: opened by the first user, closed by the last.

Invariant: there is at most one open resource for each key; it runs in the background event loop of the process. A
resource that was not released is closed when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, Protocol, TypeVar

from agentkit.portal import portal
from agentkit.sandboxes.tasks import finished


class Resource(Protocol):
    """Can be started and closed, in bounded time; ``close`` may follow a failed ``start``."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


R = TypeVar("R", bound=Resource)
T = TypeVar("T")


class _OpenResource:
    def __init__(self, resource: Resource) -> None:
        self.resource, self.users = resource, 0
        self.lock = asyncio.Lock()
        self.ready = False


_open: dict[Hashable, _OpenResource] = {}
"""Used only in the background loop."""
os.register_at_fork(after_in_child=_open.clear)


class SharedResource(Generic[R]):
    """One user of a shared resource, which is opened on first use.

    Args:
        key: identifies the resource.
        make: creates the resource.
    """

    def __init__(self, key: Hashable, make: Callable[[], R]) -> None:
        self._key, self._make = key, make
        self._resource: _OpenResource | None = None

    async def use(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` on the resource in the background loop. Raises what ``work`` or ``start`` raises."""
        return await portal().call(self._use(work))

    async def release(self) -> None:
        """End this use; the last user closes the resource. Idempotent."""
        if self._resource is not None:
            await portal().call(finished(self._release()))

    async def _use(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        if self._resource is None:
            self._resource = _open.get(self._key)
            if self._resource is None:
                self._resource = _open[self._key] = _OpenResource(self._make())
            self._resource.users += 1
        opened = self._resource
        async with opened.lock:
            if not opened.ready:
                portal().opened(opened.resource)
                await opened.resource.start()
                opened.ready = True
        return await work(opened.resource)  # pyright: ignore[reportArgumentType]

    async def _release(self) -> None:
        opened, self._resource = self._resource, None
        if opened is None:
            return
        opened.users -= 1
        if not opened.users:
            if _open.get(self._key) is opened:
                del _open[self._key]
            try:
                await opened.resource.close()
            finally:
                portal().closed(opened.resource)
