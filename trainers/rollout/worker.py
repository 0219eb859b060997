"""What runs in the processes of environments: a small parent that forks, and one child an environment.

Invariant: nothing here outlives the process that started it. The nursery leaves as soon as its control socket closes
or its parent is gone, and kills the process group of every child on the way; a child is killed by the kernel when the
nursery dies. The nursery stays single-threaded and runs no environment code, so that forking it is safe and cheap.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

# Preloaded once, shared by every child through copy-on-write.
import agentkit.envs.base
import agentkit.registry  # noqa: F401
from agentkit.errors import EnvError
from agentkit.trainers.rollout.contract import crashed, run_actions, run_reset

PID = struct.Struct("!q")
LENGTH = struct.Struct("!I")
FORK, REAP = b"F", b"R"
MAIN = "__agentkit_main__"
"""Name under which the user's script is loaded again, when it defines the environment itself."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 1.0


def nursery(control_fd: int) -> None:
    """Serve fork requests until the control socket closes. Never returns in the children that it forks."""
    control = socket.socket(fileno=control_fd)
    parent = os.getppid()
    children: set[int] = set()
    try:
        while os.getppid() == parent:
            if not select.select([control], [], [], _PARENT_CHECK_S)[0]:
                continue
            message, fds, _, _ = socket.recv_fds(control, 64, 1)
            if not message:
                break
            if message[:1] == FORK:
                pid = _fork(fds[0], control)
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


def _fork(fd: int, control: socket.socket) -> int:
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
        die_with_parent(nursery_pid)
        os.dup2(2, 1)  # what an environment prints must not mix with the run's own output
        serve(socket.socket(fileno=fd))
        code = 0
    finally:
        os._exit(code)
    raise AssertionError("unreachable")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the closed socket has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def serve(connection: socket.socket) -> None:
    """Make one environment and answer calls to it until the other end closes."""
    env: Any = None
    make: Callable[[], Any] = _unmade
    while True:
        request = _receive(connection)
        if request is None:
            return
        name, *arguments = pickle.loads(request)
        try:
            if name == "make":
                make = _maker(*arguments)
                continue  # told together with the reset that follows
            if name == "reset":
                if env is None:
                    env = _made(make)
                value: Any = run_reset(env, arguments[0])
            elif name == "act":
                value = run_actions(env, arguments[0])
            else:
                if env is not None:
                    env.close()
                value = None
            reply = ["ok", value]
        except EnvError as error:
            reply = [type(error).__name__, str(error)]
        except BaseException as error:
            reply = ["EnvCrashed", str(crashed(name, error))]
        payload = json.dumps(reply).encode()
        connection.sendall(LENGTH.pack(len(payload)) + payload)
        if name == "close":
            return


def _unmade() -> Any:
    raise RuntimeError("no environment was named before the first reset")


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise crashed("making the environment", error) from error


def _maker(module: str, qualname: str, kwargs: dict[str, Any], main_path: str | None) -> Callable[[], Any]:
    def make() -> Any:
        if main_path is not None:
            target: Any = runpy.run_path(main_path, run_name=MAIN)[qualname.split(".")[0]]
            parts = qualname.split(".")[1:]
        else:
            target, parts = importlib.import_module(module), qualname.split(".")
        for part in parts:
            target = getattr(target, part)
        return target(**kwargs)

    return make


def _receive(connection: socket.socket) -> bytes | None:
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
