"""Prefix store: keys and values of sessions that wait for their environment.

Invariant: stored values were computed under the current weights (``clear`` on every change), and the store never
exceeds its budget of tokens; the least recently used session is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from agentkit.types import IntArray

_LATEST = 64
"""Sessions that are searched for the prefix of a new one; the members of a group play at about the same time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The ids of a prefix and their keys and values, as ``RowCache.extract`` gives them."""

    ids: IntArray
    memory: tuple[torch.Tensor, torch.Tensor]


class SessionStore:
    """Least-recently-used cache of prefixes, one per session."""

    def __init__(self, budget: int) -> None:
        """``budget``: maximum tokens over all sessions; 0 stores nothing."""
        self._budget = budget
        self._tokens = 0
        self._sessions: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        return self._tokens

    def fits(self, tokens: int) -> bool:
        """Return whether a prefix of this many tokens can be stored."""
        return tokens <= self._budget

    def put(self, session: str, stored: Stored) -> None:
        """Store the prefix of ``session`` and replace an older one."""
        self.forget(session)
        self._sessions[session] = stored
        self._tokens += len(stored.ids)
        while self._tokens > self._budget:
            _, oldest = self._sessions.popitem(last=False)
            self._tokens -= len(oldest.ids)

    def get(self, session: str) -> Stored | None:
        """Return the stored prefix of ``session``."""
        return self._sessions.get(session)

    def latest(self) -> Iterator[Stored]:
        """Yield the prefixes that were stored last."""
        return islice(reversed(self._sessions.values()), _LATEST)

    def forget(self, session: str) -> None:
        """Remove the stored prefix of ``session``, if any."""
        stored = self._sessions.pop(session, None)
        if stored is not None:
            self._tokens -= len(stored.ids)

    def clear(self) -> None:
        self._sessions.clear()
        self._tokens = 0


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Return the number of equal leading ids."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
