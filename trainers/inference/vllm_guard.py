"""End vLLM's processes when their owner ends, even if it was killed with SIGKILL.

vLLM's engine process does not notice the death of its owner. Its workers import this module's caller; a thread in each
looks once a second whether the engine process is still the owner's child, and ends the engine when it is not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping

import psutil

OWNER = "AGENTKIT_VLLM_OWNER"
"""Variable with the id of the process that owns the engine; set only for the engine's processes."""
POLL_S = 1.0
GRACE_S = 10.0


def guard(environment: Mapping[str, str] = os.environ) -> threading.Thread | None:
    """Start watching in a process of an engine that ``launch`` started; return None elsewhere.

    Processes that vLLM did not start through ``multiprocessing`` (Ray's) are not watched.
    """
    owner = int(environment.get(OWNER, "0"))
    parent = multiprocessing.parent_process()
    if not owner or owner == os.getpid() or parent is None or parent.pid is None:
        return None
    engine = os.getpid() if parent.pid == owner else parent.pid
    thread = threading.Thread(target=_watch, args=(engine, owner), name="agentkit-guard", daemon=True)
    thread.start()
    return thread


def _watch(engine: int, owner: int) -> None:
    while _parent(engine) == owner:
        time.sleep(POLL_S)
    if engine != os.getpid():
        end(engine)
    os.kill(os.getpid(), signal.SIGKILL)


def _parent(process: int) -> int | None:
    try:
        return psutil.Process(process).ppid()
    except psutil.NoSuchProcess:
        return None


def end(process: int) -> None:
    """Terminate a process; kill it if it does not end in time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process)
        found.terminate()
        try:
            found.wait(GRACE_S)
        except psutil.TimeoutExpired:
            found.kill()
