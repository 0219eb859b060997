"""Encode and decode the messages between a sandboxed environment and its host.

A message is a frame of ``agentkit.envs.framing``: JSON, or a picture with its dimensions. Frames travel over the
standard streams of a process.

Invariant: pure functions, the same on both sides. A decoded frame is plain data (texts, finite numbers, booleans,
lists, maps) or a picture; anything else is a ``FrameError``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from agentkit.envs.framing import FrameError, frame

VERSION = 3
"""Version of this protocol; the host sends its own when an environment is made."""
JSON, PICTURE = 1, 2
MESSAGE_LIMIT = 8 << 20
"""Bytes of the longest message."""
PICTURE_LIMIT = 32 << 20
"""Bytes of the largest picture."""

_DIMENSIONS = struct.Struct("!IHHB")
LIMITS = {JSON: MESSAGE_LIMIT, PICTURE: PICTURE_LIMIT + _DIMENSIONS.size}
"""Bytes of the largest content of each kind of frame."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def encode(value: Any) -> bytes:
    """Return a frame of JSON. Raises ``FrameError`` for a value that is not plain data or is too large."""
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise FrameError("a text contains half of a surrogate pair, which cannot be encoded") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not plain, finite data: {error}") from None
    if len(content) > MESSAGE_LIMIT:
        raise FrameError(f"a message of {len(content)} bytes; the limit is {MESSAGE_LIMIT}")
    return frame(JSON, content)


def decode(content: bytes) -> Any:
    """Return the value in a frame of JSON. Raises ``FrameError``."""
    try:
        text = content.decode()
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not plain, finite data: {str(error)[:200]}") from None
    return value


def encode_picture(number: int, pixels: NDArray[np.uint8]) -> bytes:
    """Return a frame with a picture (height, width, 3 or 4 bytes a pixel), the answer to request ``number``.

    Raises ``FrameError`` for an array of another type or shape.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise FrameError(f"a picture of type {pixels.dtype} and shape {pixels.shape}; it must be uint8 (h, w, 3 or 4)")
    if pixels.nbytes > PICTURE_LIMIT or max(pixels.shape) > 0xFFFF:
        raise FrameError(f"a picture of shape {pixels.shape}; the limit is {PICTURE_LIMIT} bytes")
    return frame(PICTURE, _DIMENSIONS.pack(number, *pixels.shape) + pixels.tobytes())


def decode_picture(content: bytes) -> tuple[int, NDArray[np.uint8]]:
    """Return the number of the answered request, and the picture. Raises ``FrameError``."""
    if len(content) < _DIMENSIONS.size:
        raise FrameError("a picture without dimensions")
    number, height, width, depth = _DIMENSIONS.unpack_from(content)
    size = len(content) - _DIMENSIONS.size
    if depth not in (3, 4) or height * width * depth != size:
        raise FrameError(f"a picture of {height} x {width} x {depth} in {size} bytes")
    pixels = np.frombuffer(content, np.uint8, offset=_DIMENSIONS.size).reshape(height, width, depth)
    return number, pixels.copy()


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not finite")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not finite")
    return number
