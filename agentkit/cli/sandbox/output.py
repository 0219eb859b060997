"""Tables, sizes and durations, and the output of programs, with control characters escaped on a terminal."""

from __future__ import annotations

import codecs
import os
import select
from collections.abc import Callable
from typing import TextIO

import typer

from agentkit.text import printable


def print_table(lines: list[tuple[str, ...]]) -> None:
    """Print lines below their header in columns, at full width."""
    cells = [[printable(cell).replace("\n", " ") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells if len(lines) > 1 else [["no sandboxes"]]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())


def size(count: int | None) -> str:
    """Format a number of bytes."""
    if count is None:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def span(seconds: float) -> str:
    """Format a duration in the largest unit of which there are at least two, else in seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def writer(stream: TextIO) -> Callable[[bytes], None]:
    """Return a function that writes output to ``stream``; a terminal gets control characters escaped."""
    if not stream.isatty():
        return lambda data: _write(stream, data)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda data: _write(stream, printable(decoder.decode(data)).encode())


def _write(stream: TextIO, data: bytes) -> None:
    """Write bytes, independent of the encoding of the stream."""
    stream.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream.fileno(), view) :]
        except BlockingIOError:  # another program made the shared terminal non-blocking
            select.select([], [stream], [])
