"""The frames between host and agent, and a parser for untrusted input. Pure functions.

Invariant: the parser allocates at most one frame beyond the received bytes. It creates only integers, floats and bytes,
and returns a well-formed frame or raises ``ProtocolError``.

A frame is ``length (4 bytes), kind (1), id (4)`` in network order and ``length`` bytes of payload. ``INPUT``,
``OUTPUT`` and ``ERRORS`` carry raw bytes; every other payload is a sequence of fields: ``i`` and 8 bytes (integer),
``f`` and 8 bytes (float), or ``b``, a 4-byte length and bytes. Ids of requests are the host's (below ``RELAYS``), ids
of relayed connections the agent's. The fields are packed and unpacked by ``agent.py``, which must be one file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from agentkit.errors import ProtocolError
from agentkit.sandboxes.agent import agent

VERSION = agent.VERSION
MAX_PAYLOAD = agent.MAX_PAYLOAD
"""Bytes of the largest payload; longer streams come in several frames."""
CHUNK = agent.CHUNK
"""Maximum bytes of a stream in one frame."""
RELAYS = agent.RELAYS
"""The first id of a relayed connection."""

_HEADER = agent.HEADER

pack = agent.pack
"""Return the payload with these fields: integers (64 bits), floats or bytes."""


class Kind(IntEnum):
    """Kind of a frame. ``→`` host to agent, ``←`` agent to host."""

    HELLO = 1
    """← version, nonce, boot: the first frame of a connection; ``boot`` differs in each start of an agent."""
    PING = 2
    """→"""
    PONG = 3
    """←"""
    RUN = 4
    """→ operation and its arguments: starts a job."""
    STARTED = 5
    """← process id: the program of a streaming job runs. For a ``resume``: the bytes of input that the job has taken,
    and how many of them its program has not read."""
    INPUT = 6
    """→ raw bytes for a job's standard input, or for a relayed connection."""
    INPUT_END = 7
    """→ end of the input. ← the input is no longer read."""
    OUTPUT = 8
    """← raw bytes of a job's standard output, or of a relayed connection."""
    ERRORS = 9
    """← raw bytes of a job's standard error."""
    CREDIT = 10
    """Both: number of further bytes of output (→) or input (←) that may be sent."""
    SIGNAL = 11
    """→ signal number, for the job's process group."""
    CANCEL = 12
    """→ kill the job's tree; its ``DONE`` still comes. Of a relayed connection: drop it."""
    DONE = 13
    """← how a job ended, and the rest of its output."""
    FAIL = 14
    """← error code, errno and a text: the job did nothing, or failed."""
    RELAY = 15
    """→ send relayed connections to this host."""
    OPEN = 16
    """← a program connected to the relay port."""
    OUTPUT_END = 17
    """← a relayed connection sends no more."""


class Failure(IntEnum):
    """Error codes of ``FAIL``."""

    COMMAND = 1
    PATH = 2
    TOO_LARGE = 3
    DISK_FULL = 4
    RESOURCES = 5
    BAD_REQUEST = 6
    FORGOTTEN = 7
    INTERNAL = 8
    KILLED = 9
    """The process of a file operation was killed; the number is the signal."""


KINDS = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True)
class Frame:
    kind: int
    id: int
    payload: bytes


def encode(kind: int, id: int, payload: bytes = b"") -> bytes:
    """Encode a frame. Raises ``ValueError`` if the payload is too long."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a payload of {len(payload)} bytes is longer than {MAX_PAYLOAD}")
    return _HEADER.pack(len(payload), kind, id) + payload


class Decoder:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes. Raises ``ProtocolError`` at the first one that is malformed."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _HEADER.size:
                length, kind, id = _HEADER.unpack_from(buffer, start)
                if length > MAX_PAYLOAD:
                    raise ProtocolError(f"received a frame of {length} bytes; at most {MAX_PAYLOAD} are allowed")
                if kind not in KINDS:
                    raise ProtocolError(f"received a frame of the unknown kind {kind}")
                end = start + _HEADER.size + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + _HEADER.size : end])
                start = end
                yield Frame(kind, id, payload)
        finally:
            del buffer[:start]


def unpack(payload: bytes, shape: str) -> tuple:
    """Return the fields of a payload. Raises ``ProtocolError`` unless they are exactly those of ``shape``.

    ``shape``: ``i`` (integer), ``f`` (float) and ``b`` (bytes), such as ``"iib"``.
    """
    try:
        return tuple(agent.unpack(payload, shape))
    except agent.Malformed:
        raise ProtocolError(f"a payload of {len(payload)} bytes does not consist of the fields {shape!r}") from None


def pack_strings(strings: list[bytes]) -> bytes:
    """Encode strings, each terminated by NUL. Raises ``ValueError`` if one contains NUL."""
    for string in strings:
        if b"\0" in string:
            raise ValueError(f"{string[:80]!r} contains a NUL byte")
    return b"".join(string + b"\0" for string in strings)
