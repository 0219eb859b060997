"""The frames that host and agent exchange, and how they are read from somebody who lies.

Invariant: reading never allocates more than one frame beyond what was received, never builds anything but integers,
floats and bytes, and either returns a well-formed frame or raises ``ProtocolError``. Pure: no socket, no clock.

A frame is ``length (4 bytes), kind (1), id (4)`` in network order and ``length`` bytes of payload. ``INPUT``,
``OUTPUT`` and ``ERRORS`` carry raw bytes; every other payload is a flat row of fields: ``i`` and 8 bytes (integer),
``f`` and 8 bytes (float), or ``b``, a 4-byte length and bytes. Ids of requests are the host's (below ``RELAYS``), ids
of relayed connections the agent's. ``agent.py`` has the same few lines once more, because it must be one file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from agentkit.errors import ProtocolError

VERSION = 1
MAX_PAYLOAD = 1 << 20
"""Bytes of the largest payload; longer streams come in several frames."""
CHUNK = 1 << 18
"""Bytes that a sender puts into one frame of a stream."""
RELAYS = 1 << 31
"""The first id of a relayed connection."""

_HEADER = struct.Struct("!IBI")
_INTEGER = struct.Struct("!q")
_FLOAT = struct.Struct("!d")
_LENGTH = struct.Struct("!I")

Field = int | float | bytes


class Kind(IntEnum):
    """What a frame is about. ``→`` host to agent, ``←`` agent to host."""

    HELLO = 1
    """← version, nonce, boot: the first frame of a connection; ``boot`` differs in each start of an agent."""
    PING = 2
    """→"""
    PONG = 3
    """←"""
    RUN = 4
    """→ operation and its arguments: starts a job."""
    STARTED = 5
    """← process id: the program of a streaming job runs."""
    INPUT = 6
    """→ raw bytes for a job's standard input, or for a relayed connection."""
    INPUT_END = 7
    """→ no more of them."""
    OUTPUT = 8
    """← raw bytes of a job's standard output, or of a relayed connection."""
    ERRORS = 9
    """← raw bytes of a job's standard error."""
    CREDIT = 10
    """both: so many more bytes of output (→) or of input (←) may be sent."""
    SIGNAL = 11
    """→ signal number, for the job's process group."""
    CANCEL = 12
    """→ kill the job's tree; its ``DONE`` still comes. Of a relayed connection: drop it."""
    DONE = 13
    """← how a job ended, and the rest of its output."""
    FAIL = 14
    """← error code, errno and a text: the job did nothing, or failed."""
    RELAY = 15
    """→ this connection wants to be told of relayed connections."""
    OPEN = 16
    """← somebody in the sandbox connected to the relay port."""
    OUTPUT_END = 17
    """← a relayed connection sends no more."""


class Failure(IntEnum):
    """The codes of ``FAIL``; the host maps them to its errors by a table of its own."""

    COMMAND = 1
    PATH = 2
    TOO_LARGE = 3
    DISK_FULL = 4
    RESOURCES = 5
    BAD_REQUEST = 6
    FORGOTTEN = 7
    INTERNAL = 8
    KILLED = 9
    """A child that works on files was killed; the number is the signal's."""


KINDS = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True)
class Frame:
    kind: int
    id: int
    payload: bytes


def encode(kind: int, id: int, payload: bytes = b"") -> bytes:
    """A frame as bytes. Raises ``ValueError`` if the payload is too long."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(payload)} bytes is longer than {MAX_PAYLOAD}")
    return _HEADER.pack(len(payload), kind, id) + payload


class Decoder:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises ``ProtocolError`` at the first one that is malformed."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                length, kind, id = _HEADER.unpack_from(buffer, start)
                if length > MAX_PAYLOAD:
                    raise ProtocolError(f"a frame of {length} bytes came; at most {MAX_PAYLOAD} are allowed")
                if kind not in KINDS:
                    raise ProtocolError(f"a frame of the unknown kind {kind} came")
                end = start + _HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + _HEADER.size : end])
                start = end
                yield Frame(kind, id, payload)
        finally:
            del buffer[:start]


def pack(*fields: Field) -> bytes:
    """Fields as a payload."""
    parts: list[bytes] = []
    for field in fields:
        if isinstance(field, int):
            parts.append(b"i" + _INTEGER.pack(field))
        elif isinstance(field, float):
            parts.append(b"f" + _FLOAT.pack(field))
        else:
            parts += (b"b" + _LENGTH.pack(len(field)), field)
    return b"".join(parts)


def unpack(payload: bytes, shape: str) -> tuple:
    """The fields of a payload, whose types must be ``shape`` (``"ib"``: an integer, then bytes).

    Raises ``ProtocolError`` if they are not exactly these.
    """
    fields: list[Field] = []
    position = 0
    try:
        for expected in shape:
            tag = payload[position : position + 1]
            if tag != expected.encode():
                raise ProtocolError(f"a payload has {tag!r} where {expected!r} belongs (shape {shape!r})")
            position += 1
            if expected == "i":
                fields.append(_INTEGER.unpack_from(payload, position)[0])
                position += _INTEGER.size
            elif expected == "f":
                fields.append(_FLOAT.unpack_from(payload, position)[0])
                position += _FLOAT.size
            else:
                (length,) = _LENGTH.unpack_from(payload, position)
                position += _LENGTH.size
                if length > len(payload) - position:
                    raise ProtocolError(f"a field of {length} bytes is longer than its payload")
                fields.append(payload[position : position + length])
                position += length
    except struct.error:
        raise ProtocolError(f"a payload of {len(payload)} bytes ends within shape {shape!r}") from None
    if position != len(payload):
        raise ProtocolError(f"a payload has {len(payload) - position} bytes after shape {shape!r}")
    return tuple(fields)


def pack_strings(strings: list[bytes]) -> bytes:
    """Strings without NUL, each ended by one. Raises ``ValueError`` if one contains NUL."""
    for string in strings:
        if b"\0" in string:
            raise ValueError(f"{string[:80]!r} contains a NUL byte, which no argument, variable or path can")
    return b"".join(string + b"\0" for string in strings)
