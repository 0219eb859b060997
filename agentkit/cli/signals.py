"""What Ctrl-C and SIGTERM mean to a run: once, finish cleanly; twice, stop now; three times, at this instant.

Invariant: nothing that the run started outlives it. The second signal cancels the run, whose clean-up stops its
processes; when that takes longer than ``GRACE_S``, or a third signal comes, they are killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

STOPPED = 130
"""Exit status of a run that was stopped at once: the shells' number for SIGINT."""
GRACE_S = 10.0


async def obeying_signals(work: Callable[[asyncio.Event], Awaitable[T]], say: Callable[[str], None]) -> T:
    """Await ``work(stop)``; the first signal sets ``stop``, the second cancels it (``asyncio.CancelledError``)."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(work(stop))
    with _handling(asyncio.get_running_loop(), stop, task, say):
        return await task


@contextlib.contextmanager
def _handling(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, task: asyncio.Future, say: Callable[[str], None]
) -> Iterator[None]:
    count = 0
    timer = threading.Timer(GRACE_S, _kill_everything)
    timer.daemon = True

    def handle(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count == 1:
            loop.call_soon_threadsafe(stop.set)
            loop.call_soon_threadsafe(say, "finishing with a checkpoint; Ctrl-C again stops at once")
        elif count == 2:
            # Not loop.add_signal_handler: it would wait for an event loop that may be stuck.
            timer.start()
            loop.call_soon_threadsafe(task.cancel)
        else:
            _kill_everything()

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in former.items():
            signal.signal(number, handler)


def _kill_everything() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # The live view had hidden the cursor.
    os._exit(STOPPED)
