"""JSON Lines files that survive a writer killed in the middle of a line.

Invariant: every complete line is valid JSON (non-finite numbers are written as null). Readers skip an incomplete last
line, and the next writer removes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentkit.atomic_file import write_atomically


class JsonlWriter:
    """Append lines to ``path``, unbuffered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False, default=str).encode() + b"\n")

    def sync(self) -> None:
        """Wait until everything written is on disk."""
        os.fsync(self._file.fileno())

    def keep(self, condition: Callable[[dict[str, Any]], bool]) -> int:
        """Atomically remove the records that do not meet ``condition``, and return their number."""
        kept, removed = [], 0
        for record in read_jsonl(self._path):
            if condition(record):
                kept.append(record)
            else:
                removed += 1
        self._file.close()
        write_atomically(self._path, "".join(json.dumps(record) + "\n" for record in kept), durable=True)
        self._file = self._open()
        return removed

    def close(self) -> None:
        self._file.close()

    def _open(self):
        file = self._path.open("ab", buffering=0)
        text = self._path.read_bytes()
        file.truncate(text.rfind(b"\n") + 1)
        return file


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order; none if it does not exist."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for line in lines:
        if line.endswith(b"\n"):
            yield json.loads(line)


def finite(value: Any) -> Any:
    """Return ``value`` in JSON types: scalars of numpy or torch as numbers, NaN and infinities as None."""
    if hasattr(value, "item") and not isinstance(value, float):
        value = value.item()  # a scalar of numpy or torch
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
