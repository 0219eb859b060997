"""Threads for blocking calls.

Unlike those of ``concurrent.futures`` they are daemons: a call that hangs in the kernel does not keep the interpreter
alive, and calls are accepted until the interpreter has exited. A forked child starts its own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class DaemonThreadPool(Generic[R]):
    """Up to ``size`` threads, each with its own resource (such as a connection).

    Calls beyond ``size`` wait in order of arrival; a call that is cancelled before it starts is never made.

    Args:
        name: prefix of the threads' names.
        size: maximum number of threads; they are started on demand.
        make: creates a thread's resource before its first call.
        unmake: releases it at the thread's end.
    """

    def __init__(self, name: str, size: int, make: Callable[[], R], unmake: Callable[[R], None]) -> None:
        self._name = name
        self._size = size
        self._make = make
        self._unmake = unmake
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[R], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def submit(self, job: Callable[[R], T]) -> Future[T]:
        """Queue a call with the resource of its thread. Raises ``RuntimeError`` after ``close``."""
        if self._pid != os.getpid():
            self._reset()
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._idle > 0:
                self._idle -= 1  # reserved for this call
            elif self._threads < self._size:
                self._threads += 1
                threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Accept no more calls; threads end after the calls that are queued."""
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


_shared = DaemonThreadPool("agentkit-io", 32, lambda: None, lambda _: None)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in a thread and return its result."""
    return await asyncio.wrap_future(_shared.submit(lambda _: function(*args, **kwargs)))
