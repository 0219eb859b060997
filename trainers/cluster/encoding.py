"""Values and errors as bytes, for calls between processes.

Invariant: a value that cannot be pickled fails in ``encode``, before anything is sent. Decoded arrays are writable, as
they are within one process. An ``AgentkitError`` keeps its type and attributes.

Both ends belong to one run and trust each other: pickle executes what it reads.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import traceback
from typing import Any

import numpy as np
from ray import ObjectRef

from agentkit.errors import AgentkitError, RoleError

OUT_OF_BAND = 32 * 1024
"""Smallest contiguous buffer, in bytes, that is not copied into the pickle."""

Encoded = tuple[bytes, list[Any], list[Any]]
"""A pickle, its out-of-band buffers, and the references to objects in it: Ray counts only those that it passes on."""

_decoding = threading.local()


class RemoteTraceback(Exception):
    """The traceback of an error that was raised in another process, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def encode(value: Any) -> Encoded:
    """Pickle ``value``. The result refers to the memory of large arrays: do not change these until it is sent."""
    buffers: list[pickle.PickleBuffer] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < OUT_OF_BAND:
            return True
        buffers.append(buffer)
        return False

    references: list[Any] = []

    def reduce(reference: Any) -> tuple[Any, tuple[int]]:
        references.append(reference)
        return _reference, (len(references) - 1,)

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, 5, buffer_callback=in_band)
    pickler.dispatch_table = {**copyreg.dispatch_table, ObjectRef: reduce, np.ndarray: _reduce_array}
    pickler.dump(value)
    return stream.getvalue(), buffers, references


def decode(encoded: Encoded) -> Any:
    """Return the value that ``encode`` encoded. Raises the errors of unpickling."""
    payload, buffers, references = encoded
    _decoding.references = references
    try:
        return pickle.loads(payload, buffers=[bytearray(buffer) for buffer in buffers])
    finally:
        _decoding.references = None


def _reduce_array(array: np.ndarray) -> Any:
    """Reduce a small array of numbers to its bytes, in a third of the time that numpy's own way takes."""
    if array.nbytes >= OUT_OF_BAND or array.dtype.kind not in "biufc":
        return array.__reduce_ex__(5)
    return np.ndarray, (array.shape, array.dtype.str, bytearray(array.tobytes()))


def _reference(index: int) -> Any:
    return _decoding.references[index]


def size(encoded: Encoded) -> int:
    """Return the number of bytes of an encoded value."""
    payload, buffers, _ = encoded
    return len(payload) + sum(memoryview(buffer).nbytes for buffer in buffers)


def encode_error(error: BaseException, where: str) -> Encoded:
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


def decode_error(encoded: Encoded) -> AgentkitError:
    """Return the exception that ``encode_error`` encoded, with its remote traceback as the cause."""
    exact, summary, text = decode(encoded)
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
