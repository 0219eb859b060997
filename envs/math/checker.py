"""Runs in a process of its own: whether two LaTeX expressions are equal, by ``math_verify``.

Invariant: every expression is compared in a forked child with hard limits of processor time and memory, so that none
can hang, starve or crash this process. What ends a child by its own weight is not equal; only a child that was killed
from outside is reported as ``failed``.

Lines of JSON: in ``[number, gold, answer]``, out ``[number, verdict]`` with ``equal``, ``different`` or ``failed``, and
``ready`` once at the beginning. Ends with its input.

    python -I -m agentkit.envs.math.checker
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys

SECONDS = 3
"""Processor time of one comparison."""
MEMORY = 1 << 30
_OWN_WEIGHT = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}
"""Out of time, out of stack, out of memory in native code."""


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions mean the same. Needs the main thread of a process that may be lost."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.WARNING)  # that there are no time limits is known here
    # Their own time limits are alarms by the wall clock, which a busy machine would set off.
    wanted = parse(f"\\boxed{{{gold}}}", parsing_timeout=0)
    given = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    return bool(wanted and given) and verify(wanted, given, timeout_seconds=None)


def _child(number: int, gold: str, answer: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    verdict = "different"
    try:
        if equal(gold, answer):
            verdict = "equal"
    except (Exception, RecursionError, MemoryError):
        pass  # no expression that can be compared
    _say([number, verdict])


def _say(message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")  # one write: lines of several processes do not mix


def _reap(children: dict[int, int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            number = children.pop(pid)
            if os.WIFSIGNALED(status):
                _say([number, "different" if os.WTERMSIG(status) in _OWN_WEIGHT else "failed"])
            elif os.WEXITSTATUS(status):
                _say([number, "failed"])


def main() -> None:
    import math_verify  # noqa: F401 (children begin with it loaded)

    sys.stdout = sys.stderr  # what a library prints is no verdict
    equal("x + 1", "1 + x")  # builds the parser's tables, once
    parent, children, pending = os.getppid(), dict[int, int](), b""
    _say("ready")
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 0.02 if children else 1.0)
        _reap(children)
        if not readable:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            number, gold, answer = json.loads(line)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _child(number, gold, answer)
                    code = 0
                finally:
                    os._exit(code)
            children[pid] = number
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
