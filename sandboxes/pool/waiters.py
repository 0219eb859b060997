"""The queue of callers that wait for a sandbox."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import Callable

from agentkit.sandboxes.pool.slots import Slot

Waiter = asyncio.Future[Slot]


class WaitQueue:
    """Callers in order of arrival. A caller that rejoins with its first ticket keeps its position."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._waiters: list[tuple[int, Waiter]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def ticket(self) -> int:
        return next(self._tickets)

    def join(self, ticket: int) -> Waiter:
        """Return a future that gets a slot, or an error."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiters, (ticket, waiter), key=_ticket)
        return waiter

    def leave(self, ticket: int) -> None:
        """Remove a caller, if it still waits."""
        position = bisect.bisect_left(self._waiters, ticket, key=_ticket)
        if position < len(self._waiters) and self._waiters[position][0] == ticket:
            del self._waiters[position]

    def serve(self, slot: Slot) -> None:
        """Give a slot to the first caller."""
        self._waiters.pop(0)[1].set_result(slot)

    def reject(self, error: Callable[[], Exception]) -> None:
        """Let all callers raise, each its own error."""
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            waiter.set_exception(error())


def _ticket(entry: tuple[int, Waiter]) -> int:
    return entry[0]
