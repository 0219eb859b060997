"""How a sandboxed environment and its host talk: length-framed messages over a process's standard streams.

Invariant: pure, and the same on both sides. Nothing is kept of a frame before its kind and its length were found in
order; whatever a frame holds becomes plain data (texts, finite numbers, booleans, lists, maps) or a ``FrameError``.

A frame is one byte of kind, four bytes of length, and the content: JSON, or a picture behind its dimensions.
"""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

VERSION = 2
"""Of this protocol; both sides name theirs when an environment is made."""
JSON, PICTURE = 1, 2
MESSAGE_LIMIT = 8 << 20
"""Bytes of the longest message."""
PICTURE_LIMIT = 32 << 20
"""Bytes of the largest picture."""

_HEADER = struct.Struct("!BI")
_DIMENSIONS = struct.Struct("!IHHB")
_LIMITS = {JSON: MESSAGE_LIMIT, PICTURE: PICTURE_LIMIT + _DIMENSIONS.size}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class FrameError(ValueError):
    """The other side sent, or this side was to send, what is no frame; the text says what."""


def message(value: Any) -> bytes:
    """A frame of JSON. Raises ``FrameError`` for what is no plain data, no Unicode text, or too large."""
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise FrameError("a text holds half of a surrogate pair, which no encoding can carry") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not plain, finite data: {error}") from None
    if len(content) > MESSAGE_LIMIT:
        raise FrameError(f"a message of {len(content)} bytes; the most is {MESSAGE_LIMIT}")
    return _HEADER.pack(JSON, len(content)) + content


def parsed(content: bytes) -> Any:
    """What a frame of JSON holds. Raises ``FrameError``."""
    try:
        text = content.decode()
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not plain, finite data: {str(error)[:200]}") from None
    return value


def picture(number: int, pixels: NDArray[np.uint8]) -> bytes:
    """A frame of a picture (height, width, 3 or 4 bytes a pixel) that answers request ``number``.

    Raises ``FrameError`` for another array.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise FrameError(f"a picture of type {pixels.dtype} and shape {pixels.shape}; it must be uint8 (h, w, 3 or 4)")
    if pixels.nbytes > PICTURE_LIMIT or max(pixels.shape) > 0xFFFF:
        raise FrameError(f"a picture of shape {pixels.shape}; the most is {PICTURE_LIMIT} bytes")
    content = _DIMENSIONS.pack(number, *pixels.shape) + pixels.tobytes()
    return _HEADER.pack(PICTURE, len(content)) + content


def pictured(content: bytes) -> tuple[int, NDArray[np.uint8]]:
    """The request that a picture answers, and the picture. Raises ``FrameError``."""
    if len(content) < _DIMENSIONS.size:
        raise FrameError("a picture without dimensions")
    number, height, width, depth = _DIMENSIONS.unpack_from(content)
    size = len(content) - _DIMENSIONS.size
    if depth not in (3, 4) or height * width * depth != size:
        raise FrameError(f"a picture of {height} x {width} x {depth} in {size} bytes")
    pixels = np.frombuffer(content, np.uint8, offset=_DIMENSIONS.size).reshape(height, width, depth)
    return number, pixels.copy()


class Unpacker:
    """Takes bytes as they come and gives frames: kind and content."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now. Raises ``FrameError``; nothing can be read after that."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _HEADER.size:
            kind, size = _HEADER.unpack_from(self._buffer)
            limit = _LIMITS.get(kind)
            if limit is None or size > limit:
                raise FrameError(f"bytes that are no frame, or a frame that is too large: {bytes(self._buffer[:16])!r}")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[_HEADER.size : end])))
            del self._buffer[:end]
        return frames


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not finite")
    return number
