"""An event loop in a thread of its own, for those who are not asynchronous themselves.

Invariant: there is one for each process, a forked one included. What was opened through it and not closed is closed
when the interpreter ends, in bounded time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_EXIT_TIMEOUT = 15.0


class Closable(Protocol):
    async def close(self) -> None: ...


class Portal:
    """Runs coroutines in its loop, for callers of any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open: set[Any] = set()
        threading.Thread(target=self._loop.run_forever, name="agentkit-portal", daemon=True).start()
        atexit.register(self._at_exit)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, or what it raises. Interrupted, it cancels ``work`` and waits for its end."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers who await in a loop of their own; cancelled, it cancels ``work``."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def opened(self, what: Closable) -> None:
        """Close ``what`` when the interpreter ends, unless it is ``closed`` before."""
        self._open.add(what)

    def closed(self, what: Closable) -> None:
        self._open.discard(what)

    def _at_exit(self) -> None:
        if self._open:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(_EXIT_TIMEOUT)

    async def _close_all(self) -> None:
        await asyncio.gather(*(what.close() for what in self._open), return_exceptions=True)


_portal: Portal | None = None
_lock = threading.Lock()


def portal() -> Portal:
    """The portal of this process."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def _forget() -> None:
    """A forked child has neither the thread nor what its parent opened."""
    global _portal, _lock
    if _portal is not None:
        atexit.unregister(_portal._at_exit)
    _portal, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
