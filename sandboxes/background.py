"""One event loop in a thread of its own, for callers that have none, or have one that must not be waited in.

Invariant: there is at most one such thread in a process, started when first needed; a forked child gets its own. A
caller that is interrupted (Ctrl-C) cancels what it asked for and waits until that has cleaned up.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLEAN_UP = 60.0
"""Seconds that an interrupted call may take to put things in order."""


class _Background:
    """The loop and its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="agentkit-sandboxes", daemon=True)
        self.thread.start()


_background: _Background | None = None
_lock = threading.Lock()


def _current() -> _Background:
    global _background
    with _lock:
        if _background is None:
            _background = _Background()
        return _background


def run(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, computed in the background loop. Any thread may call, with or without a loop running."""
    background = _current()
    if threading.current_thread() is background.thread:
        work.close()
        raise RuntimeError("the blocking interface was called from its own event loop; await Sandbox's methods there")
    ended = threading.Event()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        task = background.loop.create_task(work)
        task.add_done_callback(lambda _: ended.set())
        tasks.append(task)

    background.loop.call_soon_threadsafe(begin)
    try:
        ended.wait()
    except BaseException:
        background.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
        ended.wait(CLEAN_UP)
        raise
    return tasks[0].result()


def _forget_in_child() -> None:
    global _background, _lock
    _background, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
