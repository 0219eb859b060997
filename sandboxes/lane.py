"""Threads for calls that block: few, and none of them can hold up the event loop or the end of the process.

Invariant: at most ``size`` calls of a lane run at once, the others wait in line, first come, first served; a call that
nobody waits for any more before it began is never made. Threads are daemons: a call that hangs in the kernel does not
keep the interpreter alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")


class Lane(Generic[R]):
    """Up to ``size`` threads, each with a resource of its own (a connection), made on demand by ``make``."""

    def __init__(self, name: str, size: int, make: Callable[[], R], unmake: Callable[[R], None]) -> None:
        self._name = name
        self._size = size
        self._make = make
        self._unmake = unmake
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[R], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[R], T]) -> Future[T]:
        """Queue a call. Raises ``RuntimeError`` once the lane is closed."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle > 0:
                self._idle -= 1  # spoken for, by this job
            elif self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Take no more calls; threads end after those that wait already."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    def _run(self) -> None:
        resource: R | None = None
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    if resource is None:
                        resource = self._make()
                    result = job(resource)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, job, item  # a result must not live until the next call
            with self._lock:
                if self._jobs.empty():
                    self._idle += 1
        if resource is not None:
            with contextlib.suppress(Exception):
                self._unmake(resource)


async def bounded(awaitable: Awaitable[T], timeout: float) -> T:
    """Await for at most ``timeout`` seconds, then cancel it and raise ``asyncio.TimeoutError``.

    Unlike ``asyncio.wait_for`` before Python 3.12 it never loses a cancellation that comes together with the result.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_see)
        raise
    if not done:
        task.cancel()
        task.add_done_callback(_see)
        raise asyncio.TimeoutError
    return task.result()


def _see(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
