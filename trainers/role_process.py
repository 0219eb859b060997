"""The parent's side of one role process: start it, call it, detect its end, stop it.

Invariant: every call ends. It returns, raises what the role raised, or raises ``RoleError`` with the process's pid, its
exit code or signal and its last output; and when that ``RoleError`` arrives, the process and its group are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agentkit.errors import RoleError
from agentkit.trainers.transport import FrameKind, Parts, RoleConnection, decode, decode_error

POLL_S = 0.1
"""Seconds between two checks of the process and of the oldest call (a lost connection is detected at once)."""
EXIT_S = 5.0
"""Seconds for a process to exit after its connection ended, and again after SIGTERM."""
TAIL_BYTES = 4096

# The child has the parent's sys.path, as with multiprocessing's spawn. It is a fresh interpreter because torch's
# threads do not survive a fork.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from agentkit.trainers.role_host import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


class RoleCall(NamedTuple):
    """One running call; ``future`` yields its result or its error."""

    call_id: int
    method: str
    future: asyncio.Future[Any]
    deadline: float


class RoleProcess:
    """One process in a separate session and process group; it ignores Ctrl-C.

    Args:
        name: of the role (and rank), for messages.
        log: file to which its output is appended; ``None`` keeps the end of it in memory for error messages.
        call_timeout: seconds after which a call that has not ended counts as hung and the process is killed.
        on_end: called once, when the process has ended in any way.
    """

    def __init__(
        self, name: str, *, log: Path | None, call_timeout: float | None, on_end: Callable[[RoleError], None]
    ) -> None:
        self.name = name
        self._log = log
        self._call_timeout = call_timeout
        self._on_end = on_end
        self._calls: dict[int, RoleCall] = {}
        self._last_id = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._connection: RoleConnection | None = None
        self._connection_lost = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._cause = ""
        self._end: RoleError | None = None
        self._tail = bytearray()
        self._output: int | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._watcher is not None and self._end is None

    async def start(self, environment: dict[str, str]) -> None:
        """Spawn the process and connect to it; ``construct`` makes the role. On an error call ``kill``."""
        ours, theirs = socket.socketpair()
        try:
            self._spawn(theirs.fileno(), environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        ours.setblocking(False)
        try:
            self._connection = await RoleConnection.open(ours, self._on_frame, self._connection_lost.set)
        except BaseException:
            ours.close()
            raise

    def request(self, kind: FrameKind, method: str, body: tuple[Parts, int]) -> RoleCall:
        """Start a call. Raises ``RoleError`` if the process has ended."""
        if self._end is not None:
            raise RoleError(str(self._end))
        assert self._connection is not None
        self._last_id += 1
        limit = float("inf") if self._call_timeout is None or kind == FrameKind.CONSTRUCT else self._call_timeout
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = RoleCall(self._last_id, method, future, time.monotonic() + limit)
        self._calls[request.call_id] = request
        self._connection.send(kind, request.call_id, body)
        return request

    def cancel(self, request: RoleCall) -> None:
        """Cancel the coroutine of a call that has not ended; its future is cancelled at once."""
        if self._calls.pop(request.call_id, None) is not None:
            request.future.cancel()
            if self._connection is not None:
                self._connection.send(FrameKind.CANCEL, request.call_id)

    def pending(self) -> list[asyncio.Future[Any]]:
        """Return the futures of all running calls."""
        return [request.future for request in self._calls.values()]

    async def stop(self) -> None:
        """Close the connection, which makes the process exit; then SIGTERM, then SIGKILL. Idempotent."""
        if self._watcher is None:
            return
        self._cause = self._cause or f"{self.name} is closed"
        if self._connection is not None:
            self._connection.close()
        await asyncio.shield(self._watcher)

    async def kill(self, cause: str) -> None:
        """End the process and its group at once; pending and later calls raise ``RoleError(cause)``. Idempotent."""
        if self._watcher is None:
            return
        self._cause = self._cause or cause
        self._signal_group(signal.SIGKILL)
        await asyncio.shield(self._watcher)

    def tail(self) -> str:
        """Return the end of the process's output (stdout and stderr)."""
        if self._log is not None:
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        return self._tail.decode(errors="replace").strip()

    # starting

    def _spawn(self, fd: int, environment: dict[str, str]) -> None:
        boot = [sys.executable, "-u", "-c", _BOOT, json.dumps(sys.path), str(fd), str(os.getpid()), self.name]
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            output = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._log_start = os.fstat(output).st_size
        else:
            self._output, output = os.pipe()
            os.set_blocking(self._output, False)
            asyncio.get_running_loop().add_reader(self._output, self._drain)
        try:
            self._popen = subprocess.Popen(
                boot,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=[fd],
                start_new_session=True,
            )
        except BaseException:
            self._close_output()
            raise
        finally:
            os.close(output)

    def _drain(self) -> bool:
        """Read output of the process once; return False if there is none for now."""
        if self._output is None:
            return False
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._close_output()
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return True

    def _close_output(self) -> None:
        if self._output is not None:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = None

    # answers

    def _on_frame(self, kind: int, call_id: int, body: bytes | bytearray, num_buffers: int) -> None:
        request = self._calls.pop(call_id, None)
        if request is None or request.future.done():
            return  # it was cancelled
        try:
            if kind == FrameKind.RESULT:
                request.future.set_result(decode(body, num_buffers))
            else:
                request.future.set_exception(decode_error(body, num_buffers))
        except Exception as cause:
            error = RoleError(f"{self.name} (pid {self.pid}): the result of {request.method} cannot be read: {cause!r}")
            request.future.set_exception(error)

    # the end

    async def _watch(self) -> None:
        """Wait until the process ends or has to be stopped; then kill its group and fail pending calls."""
        try:
            while not self._exited() and not self._connection_lost.is_set():
                self._find_hung_call()
                await self._sleep()
            for number in (None, signal.SIGTERM):
                if number is not None:
                    self._signal_group(number)
                patience = time.monotonic() + EXIT_S
                while not self._exited() and time.monotonic() < patience:  # noqa: ASYNC110  (no event signals it)
                    await asyncio.sleep(0.01)
        finally:
            self._reap()

    async def _sleep(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._connection_lost.wait(), POLL_S)

    def _find_hung_call(self) -> None:
        # All calls have the same limit, so the first one is the oldest.
        oldest = next(iter(self._calls.values()), None)
        if oldest is not None and time.monotonic() > oldest.deadline:
            self._cause = self._cause or (
                f"{self.name} (pid {self.pid}) did not answer {oldest.method} within {self._call_timeout} s, so it was "
                "killed; it hangs, or the time limit is too short for this call"
            )
            self._signal_group(signal.SIGKILL)

    def _exited(self) -> bool:
        """Return whether the process has ended. It stays a zombie, so its pid and group are not reused."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _signal_group(self, number: int) -> None:
        if self._end is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _reap(self) -> None:
        assert self._popen is not None
        self._signal_group(signal.SIGKILL)
        try:
            self._popen.wait(timeout=EXIT_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel, for example in a driver
            self._cause = f"{self.name} (pid {self.pid}) does not even react to SIGKILL. {self._cause}".strip()
        if self._connection is not None:
            self._connection.close()
        while self._drain():
            pass
        self._close_output()
        pending, self._calls = list(self._calls.values()), {}
        self._end = RoleError(self._cause or self._obituary(pending))
        for request in pending:
            if not request.future.done():
                request.future.set_exception(RoleError(str(self._end)))
        self._on_end(self._end)

    def _obituary(self, pending: list[RoleCall]) -> str:
        assert self._popen is not None
        code = self._popen.returncode
        end = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
        during = ", ".join(sorted({request.method for request in pending}))
        calls = f" during {len(pending)} call(s) of {during}" if pending else ""
        hint = " Often that is the kernel, out of memory." if -code == signal.SIGKILL else ""
        return f"{self.name} (pid {self.pid}) {end}{calls}.{hint} Its last output:\n{self.tail() or '(none)'}"
