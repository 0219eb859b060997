"""The order of tasks: the seeds of an environment.

Invariant: the k-th task of a run has seed ``first_seed + k`` (modulo ``num_tasks``); a restored cursor continues at its
position, so resuming neither skips nor repeats a task.
"""

from __future__ import annotations


class TaskCursor:
    """Iterates over the seeds of tasks. ``position`` is the number of seeds taken."""

    def __init__(self, first_seed: int, num_tasks: int | None, position: int = 0) -> None:
        self._first_seed = first_seed
        self._num_tasks = num_tasks
        self.position = position

    def next(self) -> int:
        """Return the seed of the next task."""
        index = self.position if self._num_tasks is None else self.position % self._num_tasks
        self.position += 1
        return self._first_seed + index
