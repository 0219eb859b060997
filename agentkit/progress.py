"""What long work is under way, for a command to show.

Code that may run for more than a few seconds enters ``work(...)`` and counts what is done. That shows nothing. A
command asks ``describe()`` for one line of text whenever it wants to show something. Any thread may do either.

Invariant: work that was entered is left, also by an exception, and reporting never makes the work fail.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Work:
    """One piece of work: how much of ``total`` is done, in ``unit`` (``B`` is shown as KiB, MiB or GiB)."""

    def __init__(self, label: str, total: int | None, unit: str, detail: Callable[[], str] | None) -> None:
        self.label = label
        self.done = 0
        self.total = total
        self._unit = unit
        self._detail = detail
        self._began = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more as done."""
        self.done += count

    def reached(self, done: int, total: int | None) -> None:
        """So much of so much is done."""
        self.done, self.total = done, total

    def describe(self) -> str:
        """For example ``evaluation 34/128 · success 41 % · 25 s · 70 s left``."""
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
    """Work that is under way until the block ends.

    Args:
        label: what is done, such as ``evaluation``.
        total: how much there is to do, where known.
        unit: of ``total``; ``B`` for bytes.
        detail: called whenever a line is shown, perhaps from another thread, for more to say. It must not raise.
    """
    entered = Work(label, total, unit, detail)
    _active.append(entered)
    try:
        yield entered
    finally:
        _active.remove(entered)


def describe() -> str:
    """One line about all work that is under way, the outermost first; empty if there is none."""
    return "; ".join(each.describe() for each in tuple(_active))


def duration(seconds: float) -> str:
    """`42 s`, `3:07` or `2:03:07`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
