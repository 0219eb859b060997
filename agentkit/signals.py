"""Run coroutines from synchronous code, and stop them on Ctrl-C or SIGTERM.

The first signal asks a run to finish cleanly, the second cancels it, the third ends it at once.

Invariant: nothing that the run started outlives it. The second signal cancels the run, whose clean-up stops its
processes. If that takes longer than ``GRACE_S``, or a third signal comes, this process and its children are killed.
If the caller's thread has a running event loop (a notebook), nothing is killed: the third signal ends the wait for the
clean-up with KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")

STOPPED = 130
"""Exit status of a command that was stopped at once: the number that shells use for SIGINT."""
GRACE_S = 10.0


class _Job:
    """A coroutine that other threads and signal handlers can stop."""

    def __init__(self, work: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._started: tuple[asyncio.AbstractEventLoop, asyncio.Event, asyncio.Task[Any]] | None = None
        self._cancelled = False

    async def run(self) -> Any:
        task = asyncio.current_task()
        assert task is not None
        stop = asyncio.Event()
        self._started = (asyncio.get_running_loop(), stop, task)
        return await self._work(stop)

    @property
    def started(self) -> bool:
        return self._started is not None

    def stop(self, then: Callable[[], None]) -> None:
        """Set the job's stop event, then call ``then`` in its event loop."""
        assert self._started is not None
        loop, stop, _ = self._started
        _schedule(loop, stop.set)
        _schedule(loop, then)

    def cancel(self) -> bool:
        """Cancel the coroutine. False if it was cancelled before or has not started."""
        if self._started is None or self._cancelled:
            return False
        self._cancelled = True
        loop, _, task = self._started
        _schedule(loop, task.cancel)
        return True


def _schedule(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the job has ended
        loop.call_soon_threadsafe(callback)


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work()`` to its end, even if this thread's event loop is running (then in another thread).

    KeyboardInterrupt cancels the coroutine, waits for its clean-up, and is raised.
    """
    return _run(_Job(lambda _: work()))


def run_interruptible(work: Callable[[asyncio.Event], Coroutine[Any, Any, T]], say: Callable[[str], None]) -> T:
    """Run ``work(stop)`` to its end. In the main thread, handle SIGINT and SIGTERM while it runs.

    Args:
        work: a function of an event. The first signal sets the event; the second cancels the coroutine.
        say: called in the coroutine's event loop with a text for the user.

    Raises:
        KeyboardInterrupt: the coroutine was cancelled.
    """
    job = _Job(work)
    try:
        if threading.current_thread() is not threading.main_thread():
            return _run(job)
        with _handling(job, say, kill=not _loop_is_running()):
            return _run(job)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run(job: _Job) -> Any:
    if not _loop_is_running():
        return asyncio.run(job.run())
    executor = ThreadPoolExecutor(1, "agentkit-run")
    future = executor.submit(lambda: asyncio.run(job.run()))
    executor.shutdown(wait=False)
    try:
        return future.result()
    except KeyboardInterrupt:
        if job.cancel():
            wait([future])
        raise


@contextlib.contextmanager
def _handling(job: _Job, say: Callable[[str], None], *, kill: bool) -> Iterator[None]:
    count = 0
    timer = threading.Timer(GRACE_S, _kill_everything)
    timer.daemon = True

    def handle(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if not job.started:
            raise KeyboardInterrupt
        if count == 1:
            job.stop(then=lambda: say("finishing with a checkpoint; Ctrl-C again stops at once"))
        elif count == 2:
            # Not loop.add_signal_handler: it would wait for an event loop that may be stuck.
            if kill:
                timer.start()
            job.cancel()
        elif kill:
            _kill_everything()
        else:
            raise KeyboardInterrupt

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in former.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _kill_everything() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # The live view had hidden the cursor.
    os._exit(STOPPED)
