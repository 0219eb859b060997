"""Resumable downloads.

Invariant: the partial file is a prefix of the remote file. The download is continued only if the server confirms by
entity tag or date that the file has not changed; otherwise it starts again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from agentkit.errors import DataError

Progress = Callable[..., Any]
ATTEMPTS = 5
"""Maximum number of consecutive attempts without new bytes."""
TIMEOUT = 60.0
"""Seconds without a byte after which an attempt fails."""


def download(
    url: str,
    target: Path,
    *,
    size: int | None = None,
    progress: Progress = lambda done, total: None,
    pause: float = 1.0,
    timeout: float = TIMEOUT,
) -> None:
    """Download ``url`` to ``target``, continuing an earlier download from ``target.part``.

    Args:
        url: address of the file.
        target: path of the complete file; nothing is done if it exists.
        size: expected number of bytes, if known.
        progress: called with the bytes so far and the total (or None).
        pause: seconds before the second attempt; doubled with each further one.
        timeout: seconds without a byte after which an attempt fails.

    Raises:
        DataError: the server refuses, sends a web page or another size, or the connection fails too often.
    """
    if target.exists():
        return
    part, tag = target.with_name(target.name + ".part"), target.with_name(target.name + ".tag")
    failures = 0
    while True:
        before = _length(part)
        try:
            total = _attempt(url, part, tag, progress, timeout)
        except httpx.HTTPError as error:
            failures = failures + 1 if _length(part) <= before else 1
            if failures >= ATTEMPTS:
                raise DataError(
                    f"{url} could not be downloaded: {error or type(error).__name__}; {_length(part)} bytes are kept, "
                    "and the next download continues there"
                ) from error
            time.sleep(pause * 2 ** (failures - 1))
            continue
        if total is None or _length(part) == total:
            break
    if size is not None and _length(part) != size:
        found = _length(part)
        part.unlink()
        raise DataError(f"{url} has {found} bytes instead of {size}: it is not the official file")
    part.rename(target)
    tag.unlink(missing_ok=True)


def _attempt(url: str, part: Path, tag: Path, progress: Progress, timeout: float) -> int | None:
    """Send one request, and return the size of the whole file if the server reports it."""
    start, validator = _length(part), tag.read_text() if tag.exists() else ""
    headers = {"Accept-Encoding": "identity"}  # the lengths are then those of the file itself
    if start and validator:
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    with httpx.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        if response.status_code == 416:  # the file is complete, or has become shorter
            total = _whole(response)
            if total != start:
                part.unlink(missing_ok=True)
                raise httpx.ReadError("the file has changed on the server")
            return total
        if response.status_code >= 500 or response.status_code == 429:
            raise httpx.ReadError(f"the server answers {response.status_code}")
        if response.status_code not in (200, 206):
            raise DataError(f"{url} cannot be downloaded: the server answers {response.status_code}")
        if response.headers.get("content-type", "").startswith("text/html"):
            raise DataError(f"{url} gives a web page instead of the file; download it in a browser, then use --from")
        goes_on = response.status_code == 206
        if goes_on and not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
            part.unlink(missing_ok=True)
            raise httpx.ReadError("the server sent another range than requested")
        total = _whole(response) if goes_on else _number(response.headers.get("content-length"))
        etag = response.headers.get("etag", "")
        tag.write_text(etag if etag and not etag.startswith("W/") else response.headers.get("last-modified", ""))
        with part.open("ab" if goes_on else "wb") as out:
            done = start if goes_on else 0
            for block in response.iter_raw():  # unbuffered: an interruption loses little
                out.write(block)
                done += len(block)
                progress(done, total)
        return total


def _whole(response: httpx.Response) -> int | None:
    """Return the size of the whole file from a partial response."""
    found = re.fullmatch(r"bytes .*/(\d+)", response.headers.get("content-range", ""))
    return int(found[1]) if found else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
