"""A part of an environment in a process of its own: native code that crashes, hangs, or bears no threads.

Invariant: every call ends within its timeout, with an answer or with an ``EnvError``; a child that did anything else
than answer is killed, with its group, and its next call starts a fresh one. All children end with this process, even
when that is killed.

Children are forked from one warm process for each module (``forking.nursery``), which has imported it: starting one
takes milliseconds, however slow the import is. The module has a function ``serve(connection)`` that reads
``[name, arguments...]`` and answers ``[kind, value]``, both as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from agentkit.envs.forking import FORK, LENGTH, PID, REAP
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout

START_TIMEOUT = 120.0
"""Seconds for the warm process to import its module, on a machine that does many other things."""
_LARGEST_ANSWER = 16 << 20
_END_TIMEOUT = 2.0
_BOOT = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from agentkit.envs.forking import nursery; "
    "nursery(int(sys.argv[1]), importlib.import_module(sys.argv[3]).serve)"
)


class _Nursery:
    """The warm process of one module; started on first use, and again should it ever die."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[int, socket.socket]:
        """A new child's process id, which is also its group's, and the socket that it serves."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                control = self._started()
                socket.send_fds(control, [FORK], [theirs.fileno()])
                message = control.recv(64)
            if not message:
                raise EOFError("it ended; what it said is on standard error")
            return PID.unpack(message)[0], ours
        except (OSError, EOFError) as error:
            ours.close()
            self.end()
            raise EnvCrashed(f"the process that {self._module} is forked from does not answer: {error!r}") from error

    def reap(self, pid: int) -> None:
        """Kill a child's group at once, and let the nursery collect what is left of it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.send(REAP + PID.pack(pid))

    def end(self) -> None:
        """End it and every child of it, in bounded time."""
        self.forget()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def forget(self) -> None:
        """Let go of it, as a forked copy of this process does with what is its parent's."""
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def _started(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.forget()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path), self._module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                start_new_session=True,  # a Ctrl-C on the terminal is for this process, which then ends its children
            )
        ours.settimeout(START_TIMEOUT)
        self._control = ours
        return ours


_nurseries: dict[str, _Nursery] = {}
_guard = threading.Lock()


def _nursery(module: str) -> _Nursery:
    with _guard:
        return _nurseries.setdefault(module, _Nursery(module))


def _end_all() -> None:
    for nursery in _nurseries.values():
        nursery.end()


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    for nursery in _nurseries.values():
        nursery.forget()
    _nurseries.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_after_fork)


class Child:
    """A process that serves ``module``, started by the first call, and again by the first one after it failed."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._pid: int | None = None
        self._connection: socket.socket | None = None
        self._owner = 0

    @property
    def alive(self) -> bool:
        """Whether there is a process, with what earlier calls left in it."""
        return self._connection is not None

    def call(self, name: str, *arguments: Any, timeout: float) -> tuple[str, Any]:
        """The kind and the value of an answer; ``timeout`` in seconds. Raises ``EnvCrashed``, ``EnvTimeout``."""
        if self._connection is not None and self._owner != os.getpid():
            self.kill()  # a forked copy of this process leaves its parent's child alone
        if self._connection is None:
            self._pid, self._connection = _nursery(self._module).fork()
            self._owner = os.getpid()
        try:
            return self._exchange(self._connection, json.dumps([name, *arguments]).encode(), timeout)
        except TimeoutError:
            self.kill()
            raise EnvTimeout(f"{name} took longer than {timeout:g} s; its process was killed") from None
        except (OSError, EOFError) as error:
            self.kill()
            raise EnvCrashed(f"{name}: its process died (killed, out of memory, or a crash in native code)") from error
        except BaseException:
            self.kill()  # whatever comes now would be taken for the answer to the next call
            raise

    def kill(self) -> None:
        """End the process, if there is one. Harmless twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        connection.close()
        if self._pid is not None and self._owner == os.getpid():  # else it is the process's that this one is a copy of
            _nursery(self._module).reap(self._pid)

    def _exchange(self, connection: socket.socket, request: bytes, timeout: float) -> tuple[str, Any]:
        deadline = time.monotonic() + timeout
        connection.settimeout(timeout)
        connection.sendall(LENGTH.pack(len(request)) + request)
        (size,) = LENGTH.unpack(self._exactly(connection, LENGTH.size, deadline))
        if size > _LARGEST_ANSWER:
            raise EnvContractError(f"an answer of {size} bytes; the most is {_LARGEST_ANSWER}")
        kind, value = json.loads(self._exactly(connection, size, deadline))
        return kind, value

    @staticmethod
    def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = connection.recv(min(size - len(received), 1 << 20))
            if not part:
                raise EOFError
            received += part
        return bytes(received)
