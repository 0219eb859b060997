"""Memory that is freed, and that the C library still keeps for its next use by the same thread.

The engine and the learner compute in turn, in threads of one process. Without a release, each keeps what its largest
tensors took, and the process holds the sum.
"""

from __future__ import annotations

import ctypes
from functools import cache

KEPT_BYTES = 2**29
"""Less is not worth the time of getting it back from the system."""


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc, mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def release_freed_memory() -> bool:
    """Return freed memory to the system if there is much of it.

    Returns:
        Whether the C library was asked to; False with another library than glibc, too.
    """
    library = _library()
    if library is None or library.mallinfo2().fordblks < KEPT_BYTES:
        return False
    library.malloc_trim(0)
    return True


@cache
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallinfo2") and hasattr(library, "malloc_trim")):
        return None
    library.mallinfo2.restype = _Mallinfo2
    library.malloc_trim.argtypes = [ctypes.c_size_t]
    return library
