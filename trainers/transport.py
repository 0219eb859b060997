"""Frames between two processes of one run: pickles in batches over a stream socket.

Invariant: frames arrive whole, once and in order, or the connection is lost and reports it. A value that cannot be
pickled fails in ``encode``, before any byte is sent, so it never breaks the connection.

Both ends belong to one run and trust each other: pickle executes what it reads. Never pass data from a sandbox or a
network to a ``RoleConnection``.

Frames sent in one tick of the event loop are written together. Arrays above ``OUT_OF_BAND`` bytes are not copied into
the
pickle (protocol 5, out-of-band buffers); they arrive writable and aligned.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

from agentkit.errors import AgentkitError, RoleError

OUT_OF_BAND = 32 * 1024
"""Smallest contiguous buffer, in bytes, that is sent outside the pickle."""
ALIGNMENT = 64
SCRATCH = 256 * 1024
"""Bytes read at once; larger frames are received directly into separate memory."""

HEADER = struct.Struct("<QQBI")
"""Size of the body, call id, kind, number of out-of-band buffers."""
LENGTH = struct.Struct("<Q")

Parts = list[bytes | memoryview]


class FrameKind(IntEnum):
    CONSTRUCT = 0
    CALL = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in another process, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def encode(value: Any) -> tuple[Parts, int]:
    """Pickle ``value``; return the parts of the body and the number of out-of-band buffers among them.

    The parts refer to the memory of large arrays: do not change these until the call returns.
    """
    buffers: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    payload = pickle.dumps(value, 5, buffer_callback=in_band)
    if not buffers:
        return [payload], 0
    lengths = [len(payload), *(buffer.nbytes for buffer in buffers)]
    parts: Parts = [b"".join(map(LENGTH.pack, lengths)), payload]
    position = len(lengths) * LENGTH.size + len(payload)
    for buffer in buffers:
        padding = -position % ALIGNMENT
        parts += [bytes(padding), buffer]
        position += padding + buffer.nbytes
    return parts, len(buffers)


def decode(body: bytes | bytearray, num_buffers: int) -> Any:
    """Return the value of a body made by ``encode``. Raises the errors of unpickling."""
    if not num_buffers:
        return pickle.loads(body)
    view = memoryview(body)
    lengths = [LENGTH.unpack_from(body, i * LENGTH.size)[0] for i in range(num_buffers + 1)]
    start = len(lengths) * LENGTH.size
    payload = view[start : start + lengths[0]]
    position = start + lengths[0]
    buffers = []
    for length in lengths[1:]:
        position += -position % ALIGNMENT
        buffers.append(view[position : position + length])
        position += length
    return pickle.loads(payload, buffers=buffers)


def encode_error(error: BaseException, where: str) -> tuple[Parts, int]:
    """Encode an exception. An ``AgentkitError`` keeps its type and attributes; others become a ``RoleError``.

    ``where`` names the role in the message of a ``RoleError``.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    summary = f"{where} raised {type(error).__name__}: {error}\n{text}"
    exact = None
    if isinstance(error, AgentkitError):
        try:
            exact = pickle.dumps((type(error), error.args, error.__dict__), 5)
        except Exception:
            exact = pickle.dumps((type(error), (str(error),), {}), 5)
    return encode((exact, summary, text))


def decode_error(body: bytes | bytearray, num_buffers: int) -> AgentkitError:
    """Return the exception that ``encode_error`` encoded, with its remote traceback as the cause."""
    exact, summary, text = decode(body, num_buffers)
    error: AgentkitError = RoleError(summary)
    if exact is not None:
        try:
            cls, args, attributes = pickle.loads(exact)
            # Not through __init__: its signature may differ from args.
            error = cls.__new__(cls, *args)
            error.__dict__.update(attributes)
        except Exception as cause:
            error = RoleError(f"{summary}\n(its exception could not be rebuilt in this process: {cause!r})")
    error.__cause__ = RemoteTraceback(text)
    return error


class RoleConnection(asyncio.BufferedProtocol):
    """One end of the connection between a role and its caller.

    Args:
        on_frame: called with ``(kind, call_id, body, num_buffers)`` for each frame that arrives.
        on_lost: called once, when the connection is lost or closed.
    """

    def __init__(
        self, on_frame: Callable[[int, int, bytes | bytearray, int], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._outbox: Parts = []
        self._scratch = bytearray(SCRATCH)
        self._end = 0
        self._large: bytearray | None = None
        self._large_header: tuple[int, int, int] = (0, 0, 0)
        self._filled = 0

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_frame: Callable[[int, int, bytes | bytearray, int], None],
        on_lost: Callable[[], None],
    ) -> RoleConnection:
        """Serve ``sock``, a connected stream socket, and take ownership of it."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return connection

    def send(self, kind: FrameKind, call_id: int, body: tuple[Parts, int] = ([], 0)) -> None:
        """Queue one frame; it is sent at the end of this tick. On a lost connection it is dropped."""
        if self._transport is None:
            return
        parts, num_buffers = body
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(HEADER.pack(sum(map(len, parts)), call_id, kind, num_buffers))
        self._outbox += parts

    def close(self) -> None:
        """Send queued frames, then shut the socket down, also for copies of it in forked processes."""
        if self._transport is None:
            return
        self._flush()
        if self._transport is not None:
            with contextlib.suppress(OSError):  # the other side closed it first
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._transport.abort()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        transport = self._transport
        if transport is None:
            return
        small: Parts = []
        for part in outbox:
            if len(part) < OUT_OF_BAND:
                small.append(part)
                continue
            transport.write(b"".join(small))
            transport.write(part)
            small = []
        transport.write(b"".join(small))

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is not None:
            self._filled += nbytes
            if self._filled == len(self._large):
                body, self._large = self._large, None
                kind, call_id, num_buffers = self._large_header
                self._on_frame(kind, call_id, body, num_buffers)
            return
        self._end += nbytes
        self._parse()

    def _parse(self) -> None:
        """Deliver the complete frames in the scratch buffer and move the rest to its start."""
        start, end = 0, self._end
        with memoryview(self._scratch) as view:
            while end - start >= HEADER.size:
                length, call_id, kind, num_buffers = HEADER.unpack_from(view, start)
                body_start = start + HEADER.size
                if length > SCRATCH - HEADER.size:
                    self._large = bytearray(length)
                    self._large_header = (kind, call_id, num_buffers)
                    self._filled = end - body_start
                    self._large[: self._filled] = view[body_start:end]
                    start = end
                    break
                if end - body_start < length:
                    break
                start = body_start + length
                self._on_frame(kind, call_id, bytearray(view[body_start:start]), num_buffers)
            if start:
                view[: end - start] = bytes(view[start:end])
        self._end = end - start
