"""Which task comes next: the seeds of an environment, in order.

Invariant: the k-th task of a run has seed ``first_seed + k`` (modulo ``num_tasks``); a restored cursor goes on where it
was, so that resuming neither skips nor repeats a task.
"""

from __future__ import annotations


class TaskCursor:
    """Hands out seeds one after the other. ``position`` is how many it has handed out."""

    def __init__(self, first_seed: int, num_tasks: int | None, position: int = 0) -> None:
        self._first_seed = first_seed
        self._num_tasks = num_tasks
        self.position = position

    def next(self) -> int:
        """The next task's seed."""
        index = self.position if self._num_tasks is None else self.position % self._num_tasks
        self.position += 1
        return self._first_seed + index
