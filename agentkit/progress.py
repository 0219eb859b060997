"""Progress of long work, and its display.

Code that may run for more than a few seconds enters ``work(...)`` and counts what is done. A command calls
``describe()`` whenever it wants to display a line. Both may be used from any thread.

Invariant: work that was entered is left, also by an exception, and reporting never makes the work fail.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agentkit.config import RunConfig

_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class View(Protocol):
    """A display of a run. Each method returns at once; the run does not depend on what it does."""

    def start(self, config: RunConfig) -> None:
        """Show the beginning of a run of ``config.steps`` training steps."""
        ...

    def stage(self, name: str) -> None:
        """Show that a stage begins: ``starting``, ``imitation``, ``training`` or ``evaluation``."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished training step; ``step`` counts from 1."""
        ...

    def message(self, text: str) -> None:
        """Show a line of text."""
        ...

    def stop(self) -> None:
        """Restore the terminal. Idempotent."""
        ...


class Work:
    """Counter of one piece of work: ``done`` of ``total``, in ``unit`` (``B`` is shown as KiB, MiB or GiB)."""

    def __init__(self, label: str, total: int | None, unit: str, detail: Callable[[], str] | None) -> None:
        self.label = label
        self.done = 0
        self.total = total
        self._unit = unit
        self._detail = detail
        self._began = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Add ``count`` to the work done."""
        self.done += count

    def reached(self, done: int, total: int | None) -> None:
        """Set the work done and its total."""
        self.done, self.total = done, total

    def describe(self) -> str:
        """Return a line such as ``evaluation 34/128 · success 41 % · 25 s · 70 s left``."""
        done, total, seconds = self.done, self.total, time.monotonic() - self._began
        parts = [f"{self.label} {self._amount(done, total)}".rstrip()]
        if self._detail is not None:
            parts.append(self._detail())
        parts.append(duration(seconds))
        if total and 0 < done < total:
            parts.append(f"{duration(seconds * (total - done) / done)} left")
        return " · ".join(part for part in parts if part)

    def _amount(self, done: int, total: int | None) -> str:
        if not done and total is None:
            return ""
        factor, unit = 1, self._unit
        if unit == "B":
            factor, unit = next(((size, name) for size, name in _BYTES if max(done, total or 0) >= size), (1, "B"))
        counts = (done,) if total is None else (done, total)
        numbers = "/".join(str(count) if factor == 1 else f"{count / factor:.1f}" for count in counts)
        return f"{numbers} {unit}".rstrip()


_active: list[Work] = []


@contextlib.contextmanager
def work(
    label: str, total: int | None = None, *, unit: str = "", detail: Callable[[], str] | None = None
) -> Iterator[Work]:
    """Report work in progress until the block ends.

    Args:
        label: name of the work, such as ``evaluation``.
        total: amount of work, if known.
        unit: unit of ``total``; ``B`` for bytes.
        detail: returns further text; called whenever a line is displayed, possibly from another thread. It must not
            raise.
    """
    entered = Work(label, total, unit, detail)
    _active.append(entered)
    try:
        yield entered
    finally:
        _active.remove(entered)


def describe() -> str:
    """Return one line about all work in progress, outermost first; empty if there is none."""
    return "; ".join(each.describe() for each in tuple(_active))


def duration(seconds: float) -> str:
    """Format a duration as `42 s`, `3:07` or `2:03:07`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
