"""Worker process that decides whether two LaTeX expressions are equal, with ``math_verify``.

Invariant: every comparison runs in a forked child with hard limits of processor time and memory, so that no expression
can hang, starve or crash the worker. A child that exceeds its limits or crashes means "different"; only a child that
was killed from outside means "failed".
"""

from __future__ import annotations

import logging
import os
import resource
import signal
from typing import Any

from math_verify import parse, verify

from agentkit.envs.workers.fork_server import Handler

_CPU_SECONDS = 3
_MEMORY = 1 << 30
_CAUSED_BY_EXPRESSION = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}
"""Signals of a child that ran out of time, of stack, or of memory in native code."""


def make_handler() -> Handler:
    """Return a handler that answers ``compare`` calls with the verdict ``equal``, ``different`` or ``failed``."""

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        gold, answer = arguments
        pid = os.fork()
        if pid == 0:
            os._exit(_compare(gold, answer))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return "ok", "different" if os.WTERMSIG(status) in _CAUSED_BY_EXPRESSION else "failed"
        return "ok", "equal" if os.WEXITSTATUS(status) == 0 else "different"

    return handle


def _compare(gold: str, answer: str) -> int:
    """Return 0 if the expressions are equal, otherwise 1. Limits this process."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return 0 if _equal(gold, answer) else 1
    except BaseException:
        return 1  # these expressions cannot be compared


def _equal(gold: str, answer: str) -> bool:
    # The library's own time limits are alarms in real time, which would go off on a busy machine.
    wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=0)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    return bool(wanted and given) and verify(wanted, given, timeout_seconds=None)


logging.disable(logging.WARNING)  # the library warns that its time limits are off
_equal("x + 1", "1 + x")  # builds the parser's tables before workers are forked
