"""Length-framed messages: one byte of kind, four bytes of length, and the content."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_HEADER = struct.Struct("!BI")


class FrameError(ValueError):
    """The other side sent bytes that are not a valid frame, or a value cannot be sent as a frame."""


def frame(kind: int, content: bytes) -> bytes:
    """Return ``content`` as a frame."""
    return _HEADER.pack(kind, len(content)) + content


class FrameReader:
    """Split a stream of bytes into frames.

    Args:
        limits: the largest content of each kind of frame, in bytes; other kinds are errors.

    Invariant: no content is buffered before its kind and its length have been checked.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._limits = limits
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the kind and the content of each frame that ``data`` completes.

        Raises:
            FrameError: the kind is unknown or the content too large; the stream cannot be read any further.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._buffer)
            limit = self._limits.get(kind)
            if limit is None:
                raise FrameError(f"bytes that are not a frame: {bytes(self._buffer[:16])!r}")
            if size > limit:
                raise FrameError(f"a frame of {size} bytes, more than {limit}")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return frames
