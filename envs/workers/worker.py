"""A worker process, forked from a fork server, with calls for synchronous and for asynchronous code.

Invariant: every call ends within its timeout, with a reply or an ``EnvError``. A worker that failed in any other way
than by a reply is killed with its process group; the next call starts a fresh one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Iterator
from typing import Any

from agentkit.envs.framing import FrameError, FrameReader, frame
from agentkit.envs.workers.client import ForkServer
from agentkit.envs.workers.fork_server import CHUNK, LIMITS, REQUEST
from agentkit.errors import EnvContractError, EnvCrashed, EnvTimeout

START_TIMEOUT = 120.0
"""Seconds for a process to start on a busy machine, the import of its module by the fork server included."""
_RETRY_S = 0.005


class Worker:
    """A process of ``server``; starts with the first call, and again with the first call after a failure.

    One call at a time; use either ``call`` or ``call_async``.

    Args:
        server: forks the process. ``make_handler()`` of its module returns what answers calls.
        start_timeout: seconds that starting the process may take, in addition to the first call.
    """

    def __init__(self, server: ForkServer, *, start_timeout: float = START_TIMEOUT) -> None:
        self.pid: int | None = None
        """Process id, also of its group; None while no process runs."""
        self._server, self._start_timeout = server, start_timeout
        self._number = 0
        self._connection: socket.socket | None = None
        self._reader = FrameReader(LIMITS)
        self._owner = 0
        self._calling = False

    @property
    def alive(self) -> bool:
        """Whether a process runs, with the state that earlier calls left in it."""
        return self.pid is not None and self._owner == os.getpid()

    def call(self, name: str, *arguments: Any, timeout: float) -> tuple[str, Any]:
        """Call the worker and wait for its reply.

        Args:
            name: of the request.
            arguments: anything that can be pickled.
            timeout: seconds.

        Returns:
            The kind and the value of the reply.

        Raises:
            EnvTimeout: the reply took longer than ``timeout``.
            EnvCrashed: the process could not be started, or died.
            EnvContractError: the reply is too large.
        """
        request = frame(REQUEST, pickle.dumps((name, *arguments)))
        if not self.alive:
            self.kill()  # in a forked copy of the process that owns it, this only closes the connection
            with self._kill_on_failure(None, self._start_timeout):
                deadline = time.monotonic() + self._start_timeout
                while not self._fork(deadline):
                    time.sleep(_RETRY_S)
                self._started(self._exchange(b"", deadline - time.monotonic()))
        with self._kill_on_failure(name, timeout):
            kind, value = self._exchange(request, timeout)
            return kind, value

    async def call_async(self, name: str, *arguments: Any, timeout: float) -> tuple[str, Any]:
        """As ``call``, for asynchronous code. Cancelling it kills the process."""
        request = frame(REQUEST, pickle.dumps((name, *arguments)))
        if not self.alive:
            self.kill()  # in a forked copy of the process that owns it, this only closes the connection
            with self._kill_on_failure(None, self._start_timeout):
                deadline = time.monotonic() + self._start_timeout
                while not self._fork(deadline):  # noqa: ASYNC110 (nothing tells when there is room)
                    await asyncio.sleep(_RETRY_S)
                self._started(await self._exchange_async(b"", deadline - time.monotonic()))
        with self._kill_on_failure(name, timeout):
            kind, value = await self._exchange_async(request, timeout)
            return kind, value

    def kill(self) -> None:
        """End the process, and a call in progress. Idempotent."""
        connection = self._connection
        if connection is None:
            return
        if self._owner == os.getpid():  # a forked copy of this process leaves its parent's worker alone
            self._server.kill(self._number, self.pid)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.pid = None
        if not self._calling:
            connection.close()
            self._connection = None

    def _fork(self, deadline: float) -> bool:
        """Ask for a process; False if the server is too busy to take the request now."""
        if time.monotonic() > deadline:
            raise TimeoutError
        forked = self._server.fork()
        if forked is None:
            return False
        self._number, self._connection = forked
        self._connection.setblocking(False)
        self._reader, self._owner = FrameReader(LIMITS), os.getpid()
        return True

    def _started(self, pid: int) -> None:
        self.pid = pid
        self._server.responsive = True

    def _exchange(self, request: bytes, timeout: float) -> Any:
        connection, deadline = self._open_connection(), time.monotonic() + timeout
        connection.settimeout(max(timeout, 1e-3))
        connection.sendall(request)
        frames: list[tuple[int, bytes]] = []
        while not frames:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            frames = self._received(connection.recv(CHUNK))
        return json.loads(frames[0][1])

    async def _exchange_async(self, request: bytes, timeout: float) -> Any:
        connection, loop = self._open_connection(), asyncio.get_running_loop()
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends the wait below

        timer = loop.call_later(timeout, expire)
        try:
            await loop.sock_sendall(connection, request)
            frames: list[tuple[int, bytes]] = []
            while not frames:
                frames = self._received(await loop.sock_recv(connection, CHUNK))
        except (OSError, EOFError):
            if expired:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
        return json.loads(frames[0][1])

    def _open_connection(self) -> socket.socket:
        if self._connection is None:
            raise EOFError
        return self._connection

    def _received(self, data: bytes) -> list[tuple[int, bytes]]:
        if not data:
            raise EOFError
        return self._reader.feed(data)

    @contextlib.contextmanager
    def _kill_on_failure(self, call: str | None, timeout: float) -> Iterator[None]:
        """Kill the process if the body raises; raise what that means for ``call``, or for starting the process."""
        self._calling, completed = True, False
        try:
            yield
            completed = True
        except TimeoutError:
            if call is None:
                raise EnvCrashed(f"no process for {self._server.module} started within {timeout:g} s") from None
            raise EnvTimeout(f"{call} took longer than {timeout:g} s; its process was killed") from None
        except FrameError as error:
            raise EnvContractError(f"the reply to {call} is {error}") from None
        except (OSError, EOFError) as error:
            if call is None:
                raise EnvCrashed(
                    f"the process for {self._server.module} did not start; its error is on standard error: {error!r}"
                ) from error
            raise EnvCrashed(f"{call}: its process died (killed, out of memory, or a crash in native code)") from error
        finally:
            self._calling = False
            if not completed:
                self.kill()
