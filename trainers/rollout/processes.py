"""Environments in processes of their own: what hangs or crashes there is killed, and nothing else is touched.

Invariant: a child ends with its handle, its group of processes with it; all children end with this process, even when
that is killed. Children are forked from a small single-threaded nursery (``worker.py``) that has the registry loaded,
not from this process with its threads and its torch: starting one costs milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from agentkit import errors
from agentkit.envs.forking import FORK, LENGTH, PID, REAP
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout
from agentkit.trainers.rollout.contract import TurnResult
from agentkit.trainers.rollout.source import EnvSource

CLOSE_TIMEOUT = 5.0
"""Seconds that an environment gets for its ``close`` before its process is killed."""
_LARGEST_REPLY = 64 << 20
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from agentkit.trainers.rollout.worker import nursery; nursery(int(sys.argv[1]))"
)


class Nursery:
    """The process that children are forked from; started on first use, and again should it ever die."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._waiting: deque[asyncio.Future[int]] = deque()

    async def fork(self, timeout: float) -> tuple[int, socket.socket]:
        """A new child: its process id, which is also its group's, and the socket that it serves.

        Raises ``EnvCrashed`` if there is none after ``timeout`` seconds.
        """
        control = self._start()
        ours, theirs = socket.socketpair()
        reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                await asyncio.wait_for(self._request(control, theirs.fileno(), reply), timeout)
            pid = await asyncio.wait_for(reply, timeout)
        except (OSError, asyncio.TimeoutError) as error:
            ours.close()
            raise EnvCrashed(f"no process for the environment was started within {timeout:g} s: {error!r}") from error
        except BaseException:
            ours.close()
            reply.cancel()  # whoever comes in reply to it is reaped
            raise
        ours.setblocking(False)
        return pid, ours

    def reap(self, pid: int) -> None:
        """Kill a child's group at once, and let the nursery collect what is left of it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(REAP + PID.pack(pid))

    async def close(self) -> None:
        """End every child and the nursery. Idempotent."""
        process, self._process = self._process, None
        self._disconnect()
        if process is None:
            return
        for _ in range(200):
            if process.poll() is not None:
                return
            await asyncio.sleep(0.01)
        process.kill()
        process.wait()

    def _start(self) -> socket.socket:
        if self._process is not None and self._control is not None and self._process.poll() is None:
            return self._control
        self._disconnect()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C on the terminal is for the run, which then ends its children
            )
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, ours)
        return ours

    async def _request(self, control: socket.socket, fd: int, reply: asyncio.Future[int]) -> None:
        while True:
            try:
                socket.send_fds(control, [FORK], [fd])
            except BlockingIOError:
                await asyncio.sleep(0.005)
            else:
                self._waiting.append(reply)  # replies come in the order of requests
                return

    def _read(self, control: socket.socket) -> None:
        try:
            message = control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._disconnect()
            return
        (pid,) = PID.unpack(message)
        reply = self._waiting.popleft()
        if reply.done():
            self.reap(pid)  # nobody waits for this child any more
        else:
            reply.set_result(pid)

    def _disconnect(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()
        while self._waiting:
            reply = self._waiting.popleft()
            if not reply.done():
                reply.set_exception(EnvCrashed("the process that starts environments died"))


class _Link(asyncio.Protocol):
    """One request at a time over a child's socket; every reply settles one future."""

    def __init__(self) -> None:
        self.reply: asyncio.Future[bytes] | None = None
        self.lost = False
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) < LENGTH.size:
            return
        size = LENGTH.unpack_from(self._buffer)[0]
        if size > _LARGEST_REPLY:
            self._fail(EnvContractError(f"an answer of {size} bytes; the most is {_LARGEST_REPLY}"))
        elif len(self._buffer) >= LENGTH.size + size:
            payload = bytes(self._buffer[LENGTH.size : LENGTH.size + size])
            del self._buffer[: LENGTH.size + size]
            if self.reply is not None and not self.reply.done():
                self.reply.set_result(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._fail(EnvCrashed("its process died (killed, out of memory, os._exit, or a crash in native code)"))

    def expire(self, call: str, timeout: float) -> None:
        self._fail(EnvTimeout(f"{call} took longer than {timeout:g} s; its process was killed"))

    def _fail(self, error: Exception) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(error)


class ProcessEnv:
    """A synchronous environment in a child process, reused from episode to episode until something fails."""

    def __init__(self, source: EnvSource, nursery: Nursery) -> None:
        self._source = source
        self._nursery = nursery
        self._pid: int | None = None
        self._transport: asyncio.Transport | None = None
        self._link = _Link()
        self.busy = False

    async def reset(self, seed: int) -> str:
        if self._transport is None:
            await self._open()
        return await self._call("reset", (seed,), self._source.reset_timeout)

    async def act(self, actions: Sequence[str]) -> TurnResult:
        result = await self._call("act", (tuple(actions),), self._source.step_timeout * len(actions))
        return TurnResult(*result)

    async def close(self) -> None:
        """Close the environment, or kill its process right away if it is in the middle of something."""
        if self._transport is not None and not self.busy and not self._link.lost:
            with contextlib.suppress(errors.EnvError):
                await self._call("close", (), CLOSE_TIMEOUT)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        if self._pid is not None:
            pid, self._pid = self._pid, None
            self._nursery.reap(pid)

    async def _open(self) -> None:
        self.busy = True
        self._pid, connection = await self._nursery.fork(self._source.reset_timeout)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self._link, sock=connection)
        self.busy = False
        self._send("make", self._source.importable())

    async def _call(self, name: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        loop = asyncio.get_running_loop()
        self._link.reply = reply = loop.create_future()
        if self._link.lost:
            raise EnvCrashed("its process died")
        self.busy = True
        self._send(name, arguments)
        timer = loop.call_later(timeout, self._link.expire, "step" if name == "act" else name, timeout)
        try:
            kind, value = json.loads(await reply)
        finally:
            timer.cancel()
        self.busy = False
        if kind != "ok":
            raise getattr(errors, kind, EnvCrashed)(value)
        return value

    def _send(self, name: str, arguments: tuple[Any, ...]) -> None:
        assert self._transport is not None
        payload = pickle.dumps((name, *arguments))
        self._transport.write(LENGTH.pack(len(payload)) + payload)
