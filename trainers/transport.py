"""Frames between two processes of one run: pickles in batches over a stream socket.

Invariant: a frame arrives whole, once and in the order in which it was sent, or the link is lost and says so. A value
that cannot be pickled fails in ``encode``, before a byte of it is sent, so it never breaks the link for others.

Both ends belong to one run and trust each other: pickle executes what it reads. Nothing that comes out of a sandbox or
from a network may ever be fed to a ``Link``.

Frames sent in one tick of the event loop leave in one write. Arrays above ``OUT_OF_BAND`` bytes are not copied into the
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
"""Bytes from which a contiguous buffer travels beside the pickle instead of inside it."""
ALIGNMENT = 64
SCRATCH = 256 * 1024
"""Bytes read at once; frames larger than this are received straight into memory of their own."""

HEADER = struct.Struct("<QQBI")
"""Body's bytes, call id, kind, number of out-of-band buffers."""
LENGTH = struct.Struct("<Q")

Parts = list[bytes | memoryview]


class Kind(IntEnum):
    CONSTRUCT = 0
    CALL = 1
    CANCEL = 2
    RESULT = 3
    ERROR = 4


class RemoteTraceback(Exception):
    """The cause of an error that was raised in another process: its traceback, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def encode(value: Any) -> tuple[Parts, int]:
    """Pickle ``value``; returns the body's parts and the number of out-of-band buffers among them.

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
    """The value of a body made by ``encode``. Raises whatever unpickling raises."""
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
    """An exception of the far side. ``AgentkitError`` keeps its type and attributes, anything else is a ``RoleError``.

    ``where`` names the role, for the message of the latter.
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
    """The exception that ``encode_error`` described, its remote traceback as the cause."""
    exact, summary, text = decode(body, num_buffers)
    error: AgentkitError = RoleError(summary)
    if exact is not None:
        try:
            cls, args, attributes = pickle.loads(exact)
            # Not through __init__: its signature need not be its args.
            error = cls.__new__(cls, *args)
            error.__dict__.update(attributes)
        except Exception as cause:
            error = RoleError(f"{summary}\n(and its exception could not be rebuilt here: {cause!r})")
    error.__cause__ = RemoteTraceback(text)
    return error


class Link(asyncio.BufferedProtocol):
    """One end of the connection.

    Args:
        on_frame: called with ``(kind, call_id, body, num_buffers)`` for each frame that arrives.
        on_lost: called once, when nothing can be sent or received any more.
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
    ) -> Link:
        """Serve ``sock``, a connected stream socket that the link then owns."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: cls(on_frame, on_lost), sock=sock)
        return link

    def send(self, kind: Kind, call_id: int, body: tuple[Parts, int] = ([], 0)) -> None:
        """Queue one frame; it leaves at the end of this tick. On a lost link it is dropped (``on_lost`` told)."""
        if self._transport is None:
            return
        parts, num_buffers = body
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(HEADER.pack(sum(map(len, parts)), call_id, kind, num_buffers))
        self._outbox += parts

    def close(self) -> None:
        """Send what is queued, then end the connection for the other side too, even where a fork holds a copy."""
        if self._transport is None:
            return
        self._flush()
        if self._transport is not None:
            with contextlib.suppress(OSError):  # the other side was faster
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

    # asyncio's side

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
        """Deliver the whole frames in the scratch buffer and keep the rest at its beginning."""
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
