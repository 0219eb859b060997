"""Keep the beginning and the end of a stream in bounded memory."""

from __future__ import annotations

from collections import deque


class Capture:
    """Collector of output: at most ``limit`` bytes, half from the beginning and half from the end.

    ``truncated`` is True if bytes between them were dropped.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.truncated = False

    def feed(self, data: bytes) -> None:
        space = self._head_limit - len(self._head)
        if space > 0:
            self._head += data[:space]
            data = data[space:]
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
        """Return the kept bytes."""
        return bytes(self._head) + b"".join(self._tail)
