"""Run code as another user, because permissions do not restrict root, who usually runs the tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from requiring import require

T = TypeVar("T")


def as_another(work: Callable[..., T], *arguments: object, uid: int = 65534) -> T:
    """Run ``work`` in a fork as another user; return its result or raise its error. Skip without root."""
    require(os.geteuid() == 0, "run as root, who alone can become another user")
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, forking, initializer=_become, initargs=(uid,)) as pool:
        return pool.submit(work, *arguments).result()


def _become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
