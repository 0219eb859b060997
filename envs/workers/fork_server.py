"""The fork server: a warm process that has imported one module and forks workers from it.

Invariant: no worker outlives the process that started the server. The server exits when its control socket closes or
its parent is gone, and then kills the process group of every worker; the kernel kills a worker when the server dies.
The server is single-threaded and answers no calls itself, so forking it is safe and cheap.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from agentkit.envs.framing import FrameReader, frame

Handler = Callable[..., tuple[str, Any]]
"""Answers a request (a name and its arguments) with a kind and a value, which is plain data."""

FORK, KILL = b"F", b"K"
COMMAND = struct.Struct("!cq")
"""A command to the server: ``FORK`` or ``KILL``, and the number of the worker. ``FORK`` carries the worker's socket."""
REQUEST, REPLY = 1, 2
"""Kinds of frames: a pickled request from the trusted parent; a reply in JSON."""
LIMITS = {REQUEST: 1 << 30, REPLY: 64 << 20}
CHUNK = 1 << 16
"""Bytes read from a socket at once."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0
_REAP_CHECK_S = 0.02


def run(control_fd: int, module: str) -> None:
    """Serve commands until the control socket closes.

    Each worker answers with ``make_handler()`` of ``module``, which is called in the worker.
    """
    make_handler = importlib.import_module(module).make_handler
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    workers: dict[int, int] = {}
    killed: set[int] = set()
    gc.collect()
    gc.freeze()  # collecting in a worker would touch, and so copy, all shared memory
    try:
        while os.getppid() == parent:
            killed = {pid for pid in killed if not _reap(pid)}
            control.settimeout(_REAP_CHECK_S if killed else _PARENT_CHECK_S)
            try:
                message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
            except TimeoutError:
                continue
            if not message:
                break
            command, number = COMMAND.unpack(message)
            if command == FORK:
                workers[number] = _fork(fds[0], control, make_handler)
                os.close(fds[0])
            elif number in workers:
                pid = workers.pop(number)
                kill_group(pid)
                killed.add(pid)
    except ConnectionError:
        pass
    finally:
        for pid in workers.values():
            kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a worker with all processes of its group. Safe until the server has reaped the worker."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _fork(fd: int, control: socket.socket, make_handler: Callable[[], Handler]) -> int:
    server_pid = os.getpid()
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
        _die_with_parent(server_pid)
        os.dup2(2, 1)  # output of an environment must not mix with the output of the run
        _serve(socket.socket(fileno=fd), make_handler())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def _serve(connection: socket.socket, handler: Handler) -> None:
    """Send this worker's process id, then answer requests until the other end closes."""
    connection.sendall(frame(REPLY, json.dumps(os.getpid()).encode()))
    reader = FrameReader(LIMITS)
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(CHUNK):
            for _, request in reader.feed(data):
                name, *arguments = pickle.loads(request)
                connection.sendall(frame(REPLY, json.dumps(handler(name, *arguments)).encode()))


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux only; elsewhere the closed socket ends it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
