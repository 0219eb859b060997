"""The client of a fork server: starts the server process, asks it for workers, and kills them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping

from agentkit.envs.workers.fork_server import COMMAND, FORK, KILL, kill_group

_IMPORT_TIMEOUT = 100.0
"""Seconds for a server to import its module on a busy machine; a server that takes longer is replaced."""
_END_TIMEOUT = 2.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from agentkit.envs.workers.fork_server import run; run(int(sys.argv[1]), sys.argv[3])"
)


class ForkServer:
    """A fork server for workers that serve ``module``. Starts with the first worker; restarts if it died.

    Args:
        module: imported by the server; its ``make_handler()`` returns what answers the calls of a worker.
        env: environment variables in addition to those of this process.

    Thread-safe. Only ``close`` waits for the server.
    """

    def __init__(self, module: str, *, env: Mapping[str, str] | None = None) -> None:
        self.module = module
        self._env = {"PYTHONHASHSEED": "0", **(env or {})}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started = 0.0
        self.responsive = False
        """Set once the server has forked a worker."""
        _servers.add(self)

    def fork(self) -> tuple[int, socket.socket] | None:
        """Ask for a worker.

        Returns:
            The worker's number and its socket, whose first frame is the worker's process id. None if too many
            requests are waiting: try again later.

        Raises:
            OSError: the server cannot be started or has died.
        """
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs, self._lock:
                socket.send_fds(self._connect(), [COMMAND.pack(FORK, number)], [theirs.fileno()])
        except BlockingIOError:
            ours.close()
            return None
        except BaseException:
            ours.close()
            raise
        return number, ours

    def kill(self, number: int, pid: int | None) -> None:
        """Kill a worker with its process group; ``pid`` is None while it is not known yet."""
        if pid is not None:
            kill_group(pid)
        control = self._control
        if control is not None:
            with contextlib.suppress(OSError):
                control.send(COMMAND.pack(KILL, number))

    def close(self) -> None:
        """End the server with all its workers, in bounded time. The next ``fork`` starts it again."""
        self.disconnect()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def disconnect(self) -> None:
        """Close the connection without waiting for the server's end."""
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def forget(self) -> None:
        """Drop the parent's server in a forked copy of this process."""
        self.disconnect()
        self._process, self._lock = None, threading.Lock()

    def _connect(self) -> socket.socket:
        process = self._process
        if self._control is not None and process is not None and process.poll() is None:
            if self.responsive or time.monotonic() - self._started < _IMPORT_TIMEOUT:
                return self._control
            process.kill()
            process.wait()
        self.disconnect()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path), self.module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **self._env},
                start_new_session=True,  # Ctrl-C interrupts this process, which then ends its workers
            )
        ours.setblocking(False)
        self._control, self._started, self.responsive = ours, time.monotonic(), False
        return ours


_servers: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_shared: dict[str, ForkServer] = {}
_shared_lock = threading.Lock()


def shared_server(module: str) -> ForkServer:
    """Return this process's fork server for ``module``, which ends with this process."""
    with _shared_lock:
        if module not in _shared:
            _shared[module] = ForkServer(module)
        return _shared[module]


def _close_all() -> None:
    for server in list(_servers):
        server.close()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for server in list(_servers):
        server.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
