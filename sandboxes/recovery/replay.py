"""Record actions with digests of their results, and repeat them on a fresh target.

Invariant: the log holds only actions that have ended with a known result. If the effect of an action is not known, the
log is unreplayable and says why. A replay stops at the first result with another digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Target = TypeVar("Target")

LOG_LIMIT = 256 * 2**20
"""Bytes of data (file contents, standard input) that a log holds."""


class Diverged(Exception):
    """A repeated action had another result than the recorded one."""

    def __init__(self, index: int, name: str) -> None:
        super().__init__(f"action {index} ({name}) has another result when it is repeated")
        self.index, self.name = index, name


@dataclass(frozen=True)
class Action(Generic[Target]):
    """One recorded action."""

    name: str
    run: Callable[[Target], Awaitable[Any]]
    digest: str
    """Digest of its result."""


class ActionLog(Generic[Target]):
    """The actions on one target since it was new, or since its last checkpoint.

    Args:
        describe: returns the bytes of a result that two runs of one action must have in common.
        limit: bytes of data that the log may hold.
    """

    def __init__(self, describe: Callable[[Any], bytes], limit: int = LOG_LIMIT) -> None:
        self.unreplayable: str | None = None
        """Why the actions cannot be repeated; None if they can."""
        self.epoch = 0
        """Number of calls of ``clear``."""
        self._describe, self._limit = describe, limit
        self._actions: list[Action[Target]] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._actions)

    def record(self, name: str, run: Callable[[Target], Awaitable[Any]], result: Any, size: int = 0) -> None:
        """Add an action that ended with ``result`` and holds ``size`` bytes of data."""
        self._size += size
        if self._size > self._limit:
            self.give_up(f"the log would hold more than {self._limit} bytes; take checkpoints in between")
        if self.unreplayable is None:
            self._actions.append(Action(name, run, self._digest(result)))

    def give_up(self, reason: str) -> None:
        """Declare the actions unreplayable and drop them."""
        self.unreplayable = self.unreplayable or reason
        self._actions.clear()

    def clear(self) -> None:
        """Start again, from a new target or a checkpoint."""
        self._actions.clear()
        self._size, self.unreplayable = 0, None
        self.epoch += 1

    async def repeat(self, index: int, target: Target) -> None:
        """Repeat one action. Raises ``Diverged`` if its result differs, and any error of the action."""
        action = self._actions[index]
        if self._digest(await action.run(target)) != action.digest:
            raise Diverged(index, action.name)

    async def repeat_all(self, target: Target) -> None:
        """Repeat all actions in order, until the log is cleared. Raises like ``repeat``."""
        index = 0
        while index < len(self._actions):
            await self.repeat(index, target)
            index += 1

    def _digest(self, result: Any) -> str:
        return hashlib.sha256(self._describe(result)).hexdigest()
