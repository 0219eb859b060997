"""The process of a role: construct the role, serve its coroutine methods, and end with the parent.

Invariant: this process ends when its parent ends in any way: the end of the connection stops the event loop, and the
kernel kills a process that hangs (``PR_SET_PDEATHSIG``).

``agentkit.trainers.role_process`` starts ``main`` in a fresh interpreter.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import pkgutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from agentkit.errors import RoleError
from agentkit.trainers.transport import FrameKind, RoleConnection, decode, encode, encode_error

PR_SET_PDEATHSIG = 1
CANCEL_S = 1.0
"""Seconds for cancelled calls to end before the process exits."""


def main(fd: int, parent: int, name: str) -> None:
    """Serve one role over the connected socket ``fd`` until ``parent`` ends the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    _die_with_parent(parent)
    faulthandler.enable()
    os.set_inheritable(fd, False)
    code = 0
    try:
        # Not asyncio.run: it would wait for the threads of the default executor.
        asyncio.new_event_loop().run_until_complete(_serve(socket.socket(fileno=fd), name))
    except BaseException:
        traceback.print_exc()
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads are not joined, because a compute thread that never returns must not delay the exit.
    os._exit(code)


def resolve(factory: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the factory itself, or the object that ``"package.module:name"`` names."""
    return pkgutil.resolve_name(factory) if isinstance(factory, str) else factory


def set_threads(threads: int | None) -> None:
    """Limit torch in this process to ``threads`` CPU threads, if torch is imported."""
    torch = sys.modules.get("torch")
    if threads is not None and torch is not None:
        torch.set_num_threads(threads)


def _die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the line above
        os._exit(0)


async def _serve(sock: socket.socket, name: str) -> None:
    host = _Host(name)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.stopped.set)
    host.connection = await RoleConnection.open(sock, host.on_frame, host.stopped.set)
    await host.stopped.wait()
    await host.cancel_calls()


class _Host:
    """The role and its running calls."""

    def __init__(self, name: str) -> None:
        self.connection: RoleConnection | None = None
        self.stopped = asyncio.Event()
        self._where = f"{name} (pid {os.getpid()})"
        self._role: Any = None
        self._methods: frozenset[str] = frozenset()
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    def on_frame(self, kind: int, call_id: int, body: bytes | bytearray, num_buffers: int) -> None:
        if kind == FrameKind.CANCEL:
            task = self._tasks.get(call_id)
            if task is not None:
                task.cancel()
            return
        try:
            value = decode(body, num_buffers)
            if kind == FrameKind.CONSTRUCT:
                self._construct(value)
                self._send(FrameKind.RESULT, call_id, encode(self._methods))
                return
            method, args, kwargs = value
            if method not in self._methods:
                raise RoleError(f"{self._where} has no public coroutine method {method!r}")
            call = getattr(self._role, method)(*args, **kwargs)
        except Exception as error:
            self._send(FrameKind.ERROR, call_id, encode_error(error, self._where))
            return
        task = asyncio.get_running_loop().create_task(call)
        self._tasks[call_id] = task
        task.add_done_callback(lambda task: self._answer(call_id, method, task))

    async def cancel_calls(self) -> None:
        """Cancel the running calls and give them ``CANCEL_S`` to clean up."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=CANCEL_S)

    def _construct(self, value: tuple[Any, ...]) -> None:
        factory, args, kwargs, threads = value
        factory = resolve(factory)
        set_threads(threads)
        self._role = factory(*args, **kwargs)
        set_threads(threads)  # the constructor may have imported torch
        cls = type(self._role)
        self._methods = frozenset(
            name
            for name in dir(cls)
            if not name.startswith("_") and asyncio.iscoroutinefunction(getattr(cls, name, None))
        )

    def _answer(self, call_id: int, method: str, task: asyncio.Task[Any]) -> None:
        del self._tasks[call_id]
        if task.cancelled():
            # After a CANCEL frame this answer is ignored; otherwise the role cancelled itself, and the caller must not
            # see a CancelledError.
            error: BaseException | None = RoleError(f"{self._where} cancelled its own call of {method}")
        else:
            error = task.exception()
        if error is None:
            try:
                self._send(FrameKind.RESULT, call_id, encode(task.result()))
                return
            except Exception as cause:
                error = RoleError(f"{self._where}: the result of {method} cannot be sent to another process: {cause!r}")
        self._send(FrameKind.ERROR, call_id, encode_error(error, self._where))

    def _send(self, kind: FrameKind, call_id: int, body: Any) -> None:
        assert self.connection is not None
        self.connection.send(kind, call_id, body)
