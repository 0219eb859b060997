"""Keys and values of sessions that wait for their environment.

Invariant: whatever is stored was computed under the weights that are loaded now (``clear`` on every change), and the
store never holds more tokens than its budget; the session that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from agentkit.types import IntArray


@dataclass(frozen=True, slots=True)
class Stored:
    """The ids of a prefix and their keys and values, as ``RowCache.extract`` gives them."""

    ids: IntArray
    memory: tuple[torch.Tensor, torch.Tensor]


class SessionStore:
    """Least-recently-used memory of prefixes, one a session."""

    def __init__(self, budget: int) -> None:
        """``budget``: most tokens held over all sessions; 0 stores nothing."""
        self._budget = budget
        self._tokens = 0
        self._sessions: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        return self._tokens

    def fits(self, tokens: int) -> bool:
        """Whether a prefix of so many tokens may be stored at all."""
        return tokens <= self._budget

    def put(self, session: str, stored: Stored) -> None:
        """Remember the prefix of ``session`` instead of any older one."""
        self.forget(session)
        self._sessions[session] = stored
        self._tokens += len(stored.ids)
        while self._tokens > self._budget:
            _, oldest = self._sessions.popitem(last=False)
            self._tokens -= len(oldest.ids)

    def take(self, session: str) -> Stored | None:
        """Remove and return what is stored of ``session``."""
        stored = self._sessions.pop(session, None)
        if stored is not None:
            self._tokens -= len(stored.ids)
        return stored

    def forget(self, session: str) -> None:
        self.take(session)

    def clear(self) -> None:
        self._sessions.clear()
        self._tokens = 0


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
