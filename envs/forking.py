"""Processes that are forked from a small warm one, the nursery: what runs in it, and what its children speak.

Invariant: nothing here outlives the process that started it. The nursery leaves as soon as its control socket closes
or its parent is gone, and kills the process group of every child on the way; a child is killed by the kernel when the
nursery dies. The nursery stays single-threaded and answers no calls itself, so that forking it is safe and cheap.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable

PID = struct.Struct("!q")
LENGTH = struct.Struct("!I")
FORK, REAP = b"F", b"R"

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0

Serve = Callable[[socket.socket], None]
"""What a child does with its end of a connection, until the other end closes."""


def nursery(control_fd: int, serve: Serve) -> None:
    """Serve fork requests until the control socket closes. Never returns in the children that it forks."""
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    children: set[int] = set()
    gc.collect()
    gc.freeze()  # a child's collector would otherwise touch, and so copy, all that they share
    try:
        while os.getppid() == parent:
            if not select.select([control], [], [], _PARENT_CHECK_S)[0]:
                continue
            message, fds, _, _ = socket.recv_fds(control, 64, 1)
            if not message:
                break
            if message[:1] == FORK:
                pid = _fork(fds[0], control, serve)
                children.add(pid)
                os.close(fds[0])
                control.send(PID.pack(pid))
            else:
                (pid,) = PID.unpack(message[1:])
                if pid in children:
                    children.discard(pid)
                    _end(pid)
    except (ConnectionError, BrokenPipeError):
        pass
    finally:
        for pid in children:
            _end(pid)


def _end(pid: int) -> None:
    """Kill a child with all that it started, and reap it. Its id cannot have been reused: only this reaps."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _fork(fd: int, control: socket.socket, serve: Serve) -> int:
    nursery_pid = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        control.close()
        _die_with_parent(nursery_pid)
        os.dup2(2, 1)  # what an environment prints must not mix with the run's own output
        serve(socket.socket(fileno=fd))
        code = 0
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the closed socket has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def send(connection: socket.socket, payload: bytes) -> None:
    """Write one message: its length, then its bytes."""
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes | None:
    """Read one message; None when the other end has closed."""
    header = _exactly(connection, LENGTH.size)
    return None if header is None else _exactly(connection, LENGTH.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(size - len(chunks))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)
