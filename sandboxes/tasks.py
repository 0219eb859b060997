"""Helpers for asyncio tasks and awaitable resources."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Closable = TypeVar("Closable", bound=AbstractAsyncContextManager[Any])


class Opening(Coroutine[Any, Any, Closable], AbstractAsyncContextManager[Closable]):
    """A resource that is about to be opened: ``await`` it, or use ``async with``, which also closes it."""

    def __init__(self, opening: Coroutine[Any, Any, Closable]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, Closable]:
        return self._opening.__await__()

    async def __aenter__(self) -> Closable:
        self._resource = await self._opening
        return await self._resource.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._resource.__aexit__(kind, error, traceback)

    # A coroutine, for `asyncio.run`, `create_task` and task groups.

    def send(self, value: Any) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()


def opening(function: Callable[P, Coroutine[Any, Any, Closable]]) -> Callable[P, Opening[Closable]]:
    """Decorate a coroutine function that opens a resource, so that its calls can be used with ``async with``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Opening[Closable]:
        return Opening(function(*args, **kwargs))

    return call


def loop_time() -> float:
    """Return the time of the running event loop."""
    return asyncio.get_running_loop().time()


def retrieve(future: asyncio.Future[Any]) -> None:
    """Take the error of a future that has ended, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


async def finished(work: Awaitable[T]) -> T:
    """Wait until ``work`` has ended, even if the caller is cancelled meanwhile; then raise the cancellation.

    For clean-up, which must be completed. ``work`` must be bounded in time.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    retrieve(task)  # the cancellation takes precedence
    raise cancelled


_abandoned: set[asyncio.Future[Any]] = set()
"""Cancelled tasks that have not ended; the event loop only keeps weak references."""


async def bounded(work: Awaitable[T], timeout: float, discard: Callable[[T], object] = lambda _: None) -> T:
    """Await ``work`` for at most ``timeout`` seconds, then cancel it and raise ``asyncio.TimeoutError``.

    Does not wait for work that ignores its cancellation. Unlike ``asyncio.wait_for`` before Python 3.12, it never loses
    a cancellation that comes together with the result. ``discard`` gets a result that comes after the cancellation.
    """
    task = asyncio.ensure_future(work)

    def end(task: asyncio.Future[T]) -> None:
        _abandoned.discard(task)
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            raise asyncio.TimeoutError
    except BaseException:
        task.cancel()
        _abandoned.add(task)
        task.add_done_callback(end)
        raise
    return task.result()


async def stopped(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended: before Python 3.12, ``wait_for`` may lose a cancellation."""
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=1.0)


def tracked(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Start a task that is in ``tasks`` until it ends; asyncio itself keeps only a weak reference."""
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def begin(
    work: Coroutine[Any, Any, T],
    tasks: set[asyncio.Task[T]],
    then: Callable[[asyncio.Task[T]], None],
) -> asyncio.Task[T]:
    """Start a task that is in ``tasks`` until it ends; call ``then`` at its end, also after an error."""
    task = tracked(work, tasks)

    def done(task: asyncio.Task[T]) -> None:
        retrieve(task)
        then(task)

    task.add_done_callback(done)
    return task


async def ended(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    """Wait ``timeout`` seconds for tasks, then cancel the rest and give them one second to clean up."""
    for patience in (timeout, 1.0):
        if tasks:
            await asyncio.wait(set(tasks), timeout=patience)
        for task in set(tasks):
            task.cancel()
