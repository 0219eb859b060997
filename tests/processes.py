"""Checks whether processes have ended; a zombie counts as ended."""

from __future__ import annotations

import time

import psutil


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int, within: float = 10.0) -> bool:
    """Return whether the process ends within this many seconds."""
    deadline = time.monotonic() + within
    while runs(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
