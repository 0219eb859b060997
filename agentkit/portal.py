"""One background event loop per process, for blocking callers and for resources that several loops share.

anyio's portal is not used: it needs two thread switches to start a call, and it cancels every await in the clean-up of
a cancelled call.

Invariant: a forked child gets its own loop. Resources that were opened through the portal and are still open are closed
when the interpreter exits, in bounded time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

CLEAN_UP_TIMEOUT = 60.0
"""Seconds that an interrupted call may take to clean up."""
_EXIT_TIMEOUT = 15.0


class Closable(Protocol):
    async def close(self) -> None: ...


class Portal:
    """Run coroutines in the background loop, from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentkit-portal", daemon=True)
        self._thread.start()
        self._open: set[Closable] = set()
        atexit.register(self._close_open)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work`` and return its result, or raise its error.

        An interrupt (Ctrl-C) cancels ``work`` and waits for its clean-up, at most ``CLEAN_UP_TIMEOUT`` seconds.

        Raises:
            RuntimeError: called from the background loop itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call was made from the background event loop; await there instead")
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait(CLEAN_UP_TIMEOUT)
            raise
        return tasks[0].result()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` from any loop; cancelling the caller cancels ``work``."""
        return await asyncio.wrap_future(self.start(work))

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` without waiting for it; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def opened(self, resource: Closable) -> None:
        """Close ``resource`` when the interpreter exits, unless ``closed`` is called before."""
        self._open.add(resource)

    def closed(self, resource: Closable) -> None:
        self._open.discard(resource)

    def _close_open(self) -> None:
        if self._open:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._close_all(), self._loop).result(_EXIT_TIMEOUT)

    async def _close_all(self) -> None:
        await asyncio.gather(*(resource.close() for resource in self._open), return_exceptions=True)


_portal: Portal | None = None
_lock = threading.Lock()


def portal() -> Portal:
    """Return the portal of this process; starts it if necessary."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def _forget() -> None:
    """Drop the parent's portal in a forked child: its thread does not exist there."""
    global _portal, _lock
    if _portal is not None:
        atexit.unregister(_portal._close_open)
    _portal, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
