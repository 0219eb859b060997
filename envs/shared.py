"""What the environments of a process use together: opened by the first of them, closed by the last.

Invariant: there is at most one open resource for each key, it lives in the portal's loop, and every ``take`` is matched
by one ``give_back``. What nobody gave back is closed when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, Protocol, TypeVar

from agentkit.envs.portal import portal
from agentkit.sandboxes.aio import finished


class Resource(Protocol):
    """Something with a beginning and an end, both bounded in time; ``close`` may follow a ``start`` that failed."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


R = TypeVar("R", bound=Resource)
T = TypeVar("T")


class _Entry:
    def __init__(self, resource: Resource) -> None:
        self.resource, self.users = resource, 0
        self.lock = asyncio.Lock()
        self.ready = False


_entries: dict[Hashable, _Entry] = {}
"""Touched in the portal's loop alone."""
os.register_at_fork(after_in_child=_entries.clear)


class Share(Generic[R]):
    """One environment's share in the resource of ``key``, which ``make`` makes; taken on first use."""

    def __init__(self, key: Hashable, make: Callable[[], R]) -> None:
        self._key, self._make = key, make
        self._entry: _Entry | None = None

    async def use(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        """The result of ``work``, computed in the portal's loop. Raises what it or ``start`` raises."""
        return await portal().call(self._use(work))

    async def give_back(self) -> None:
        """End this share; the last one closes the resource. Twice is fine."""
        if self._entry is not None:
            await portal().call(finished(self._give_back()))

    async def _use(self, work: Callable[[R], Coroutine[Any, Any, T]]) -> T:
        if self._entry is None:
            self._entry = _entries.get(self._key)
            if self._entry is None:
                self._entry = _entries[self._key] = _Entry(self._make())
            self._entry.users += 1
        entry = self._entry
        async with entry.lock:
            if not entry.ready:
                portal().opened(entry.resource)
                await entry.resource.start()
                entry.ready = True
        return await work(entry.resource)  # pyright: ignore[reportArgumentType]

    async def _give_back(self) -> None:
        entry, self._entry = self._entry, None
        if entry is None:
            return
        entry.users -= 1
        if not entry.users:
            if _entries.get(self._key) is entry:
                del _entries[self._key]
            try:
                await entry.resource.close()
            finally:
                portal().closed(entry.resource)
