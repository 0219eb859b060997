"""Progress output during long work: one line that is updated on a terminal, or a line every few seconds.

Invariant: while a heartbeat runs, there is output at least every ``INTERVAL_S`` seconds. Afterwards the terminal is
restored.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from agentkit import progress
from agentkit.text import printable

INTERVAL_S = 4.0


class Heartbeat:
    """A thread that calls ``say`` with the work in progress after ``INTERVAL_S`` seconds without output."""

    def __init__(self, say: Callable[[str], None], fallback: str = "working") -> None:
        self.fallback = fallback
        """Text if no work is in progress."""
        self._say = say
        self._spoke = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agentkit-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def spoke(self) -> None:
        """Report other output just now."""
        self._spoke = time.monotonic()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(max(self._spoke + INTERVAL_S - time.monotonic(), 0.05)):
            if time.monotonic() >= self._spoke + INTERVAL_S:
                self.spoke()
                self._say("… " + printable(progress.describe() or self.fallback))


@contextlib.contextmanager
def watched(label: str) -> Iterator[None]:
    """Show the work in progress on standard error until the block ends; ``label`` names it."""
    with progress.work(label):
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.text import Text

            # Standard output may be a file; rich must not redirect it.
            with Live(
                get_renderable=lambda: Text(printable(progress.describe()), overflow="ellipsis", no_wrap=True),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
            ):
                yield
            return
        heartbeat = Heartbeat(lambda text: print(text, file=sys.stderr, flush=True))
        heartbeat.start()
        try:
            yield
        finally:
            heartbeat.stop()
