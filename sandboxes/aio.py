"""Small helpers for work that must be brought to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Wait until ``work`` has ended even if the caller is cancelled meanwhile; the cancellation then follows.

    For clean-up, which must not be left half done. ``work`` must be bounded in time by itself.
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
    if not task.cancelled():
        # Taken note of, so that nobody is told that it was never looked at; the cancellation goes first.
        task.exception()
    raise cancelled


async def stopped(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended: before Python 3.12, ``wait_for`` may lose a cancellation."""
    waiting = {task for task in tasks if not task.done()}
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=1.0)


def begin(
    work: Coroutine[Any, Any, None],
    tasks: set[asyncio.Task[None]],
    then: Callable[[asyncio.Task[None]], None],
) -> asyncio.Task[None]:
    """Start a task that is in ``tasks`` until it ends; ``then`` is called at its end, however it ends."""
    task = asyncio.ensure_future(work)
    tasks.add(task)

    def done(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        # Whoever waits for the task has the error; everybody else sees the counters.
        if not task.cancelled():
            task.exception()
        then(task)

    task.add_done_callback(done)
    return task


async def ended(tasks: set[asyncio.Task[None]], timeout: float) -> None:
    """Wait for tasks, and cancel those that take too long; a little longer, so that they can clean up."""
    for patience in (timeout, 1.0):
        if tasks:
            await asyncio.wait(set(tasks), timeout=patience)
        for task in set(tasks):
            task.cancel()
