"""The beginning and the end of a stream of any length, in bounded memory.

Invariant: at most ``limit`` bytes are kept, half from the beginning and half from the end; what was left out lies
between them, and ``truncated`` says that there is such.
"""

from __future__ import annotations

from collections import deque


class Capture:
    """Collects output. ``limit`` is in bytes."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.truncated = False

    def feed(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(bytes(data))
        self._tail_size += len(data)
        while self._tail_size > self._tail_limit:
            self.truncated = True
            first = self._tail.popleft()
            surplus = self._tail_size - self._tail_limit
            self._tail_size -= len(first)
            if surplus < len(first):
                self._tail.appendleft(first[surplus:])
                self._tail_size += len(first) - surplus

    def value(self) -> bytes:
        """What was kept, in order."""
        return bytes(self._head) + b"".join(self._tail)
