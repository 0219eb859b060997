"""Multiplexed requests to an agent over one socket.

Invariant: the host listens and the agent connects; a peer without the nonce of this start is refused. A request is sent
once; it ends with its answer, the loss of the connection or a timeout. Cancelling a caller kills its job before the
cancellation propagates.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import FileTooLarge, ProtocolError, SandboxError, SandboxLost, StartTimeout, UnsupportedFeature
from agentkit.sandboxes.agent.connection import WINDOW, AgentConnection, Call, JobResult
from agentkit.sandboxes.agent.launch import hide_nonce
from agentkit.sandboxes.agent.streams import AgentProcess, OutputQueue, RelayStream, result
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.output import Capture
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats, Stream

if TYPE_CHECKING:
    from agentkit.sandboxes.egress.proxy import EgressProxy

_STREAM = 1 << 20
"""Window of a stream in bytes."""
ENTRIES = 100_000
"""Maximum number of entries of a listed directory."""
_FILES = 60.0
"""Timeout of file operations in seconds."""
_ARCHIVE = 600.0
_HELLO = 5.0
_HEARTBEAT = 5.0
_PENDING = 8
_ENTRY = re.compile(rb"([fdlo]) (\d{1,19}) (\d{1,4}) (-?\d{1,20}) (.+)", re.DOTALL)
_KINDS: dict[bytes, Any] = {b"f": "file", b"d": "directory", b"l": "symlink", b"o": "other"}


class AgentChannel(Channel):
    """The channel to one start of one sandbox; use ``listen``.

    ``boot`` identifies the agent's start: channels with the same ``boot`` reach the same processes.
    """

    def __init__(self, connection: AgentConnection, *, isolation: str, workdir: str, heartbeat: float) -> None:
        self._connection = connection
        self.isolation = isolation
        self.lost = connection.lost
        self.boot = (connection.boot or b"").decode("ascii", "replace")
        self._workdir = workdir
        self._heartbeat = heartbeat
        self._relays: asyncio.Queue[RelayStream] | None = None
        self.egress: EgressProxy | None = None
        """The proxy that serves ``relays``, if the network has an allow-list."""
        self._send_heartbeat()

    @property
    def heard(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._connection.heard

    # Commands

    async def exec(self, request: ExecRequest) -> ExecResult:
        kept: dict[Stream, Capture] = {"stdout": Capture(request.output_limit), "stderr": Capture(request.output_limit)}
        call = self._start("exec", request, 2 * request.output_limit, lambda stream, data: kept[stream].feed(data))
        try:
            done = await asyncio.shield(call.done)
        except asyncio.CancelledError:
            await call.cancel()
            raise
        except SandboxLost as error:
            error.details.update(stdout=kept["stdout"].value(), stderr=kept["stderr"].value())
            raise
        return result(done, kept["stdout"], kept["stderr"])

    async def spawn(self, request: ExecRequest, *, linger: float = 0.0) -> Process:
        """As in ``Channel``; standard input stays open after ``request.stdin``.

        Args:
            request: the command. An idempotency key needs ``linger``.
            linger: seconds for which the command continues after the loss of this channel, so that another one can
                ``resume`` it by its key. Its output is held back meanwhile.
        """
        if request.idempotency_key and not linger:
            raise UnsupportedFeature("spawn does not accept an idempotency key; use exec")
        return (await self._stream_of(request, "spawn", number=math.ceil(linger)))[0]

    async def resume(self, request: ExecRequest, received: tuple[int, int]) -> tuple[Process, int]:
        """Take over the command that was spawned with the idempotency key of ``request``.

        Args:
            request: as it was spawned.
            received: numbers of bytes of standard output and standard error that were received; what was sent after
                them is sent again.

        Returns:
            The command, and the number of bytes of standard input that it has taken.

        Raises:
            SandboxError: there is no such command, or it has sent too much since then.
        """
        return await self._stream_of(request, "resume", arguments=[b"%d" % count for count in received])

    async def _stream_of(self, request: ExecRequest, operation: str, **options: Any) -> tuple[Process, int]:
        window = max(1, min(request.output_limit, _STREAM))
        output = OutputQueue(window)
        call = self._start(operation, request, window, output.take, **options)
        output.attach(call)
        try:
            await asyncio.wait([call.started, call.done], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await call.cancel()
            raise
        if call.started.cancelled():
            raise self._violated(f"the agent reported the end of a command that it had not started: {call.what}")
        return AgentProcess(call, output, request.output_limit), call.started.result()

    def _start(
        self,
        operation: str,
        request: ExecRequest,
        window: int,
        take: Any,
        arguments: list[bytes] | None = None,
        number: int = 0,
    ) -> Call:
        return self._connection.run(
            f"{request.argv[0]!r} in {request.cwd}",
            operation,
            [os.fsencode(word) for word in request.argv] if arguments is None else arguments,
            number=number,
            env=[os.fsencode(f"{name}={value}") for name, value in request.env.items()],
            cwd=request.cwd,
            timeout=request.timeout,
            window=window,
            limit=request.output_limit if operation == "exec" else window,
            key=request.idempotency_key or "",
            stdin=request.stdin if arguments is None else b"",
            more_input=operation != "exec",
            take=take,
        )

    # Files

    async def read(self, path: str, limit: int) -> bytes:
        return b"".join([piece async for piece in self.stream(path, limit)])

    async def stream(self, path: str, limit: int) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._pieces(f"read {path}", "read", [path], limit)) as pieces:
            async for data in pieces:
                limit -= len(data)
                if limit < 0:
                    raise self._violated(f"the agent sent more than the limit: read {path}")
                yield data

    async def write(self, path: str, data: bytes, mode: int) -> None:
        await self._files(f"write {path}", "write", [path], number=mode & 0o7777, stdin=data)

    async def list(self, path: str) -> list[FileInfo]:
        found: list[FileInfo] = []
        rest = b""
        async with contextlib.aclosing(self._pieces(f"list {path}", "list", [path])) as pieces:
            async for data in pieces:
                *entries, rest = (rest + data).split(b"\0")
                found += [_entry(entry, path) for entry in entries]
                if len(found) > ENTRIES:
                    raise FileTooLarge(f"{path} has more than {ENTRIES} entries", path=path)
        if rest:
            raise ProtocolError("the agent sent a malformed file entry")
        return sorted(found, key=lambda info: info.path)

    async def stat(self, path: str) -> FileInfo | None:
        done = await self._files(f"look at {path}", "stat", [path])
        return _entry(done.stdout.rstrip(b"\0"), None) if done.stdout else None

    async def remove(self, path: str) -> None:
        await self._files(f"remove {path}", "remove", [path], timeout=_ARCHIVE)

    async def mkdir(self, path: str) -> None:
        await self._files(f"make directory {path}", "mkdir", [path])

    async def pack(self, paths: Sequence[str], timeout: float = _ARCHIVE) -> AsyncGenerator[bytes, None]:
        """Yield a tar archive of directories, created in the sandbox; sockets are skipped.

        Its content is untrusted: store it, never unpack it on the host. Raises ``PathError``.
        """
        what = f"pack {', '.join(paths)}"
        async with contextlib.aclosing(self._pieces(what, "pack", paths, timeout=timeout)) as pieces:
            async for data in pieces:
                yield data

    async def unpack(self, paths: Sequence[str], archive: AsyncIterable[bytes], timeout: float = _ARCHIVE) -> None:
        """Replace the content of directories by an archive that ``pack`` made of the same ``paths``.

        Raises ``PathError``, ``DiskFull``, and ``SandboxError`` for an archive of anything else.
        """
        call = self._request(f"unpack into {', '.join(paths)}", "unpack", paths, timeout=timeout, more_input=True)
        try:
            try:
                async for data in archive:
                    call.feed(data)
                    await call.drained()
            except BrokenPipeError:
                pass  # the answer contains the error
            call.end_input()
            _checked(await asyncio.shield(call.done), call.what)
        finally:
            await call.cancel()

    async def _files(self, what: str, operation: str, paths: Sequence[str], **arguments: Any) -> JobResult:
        call = self._request(what, operation, paths, **arguments)
        try:
            return _checked(await asyncio.shield(call.done), what)
        except asyncio.CancelledError:
            await call.cancel()
            raise

    async def _pieces(
        self, what: str, operation: str, paths: Sequence[str], number: int = 0, timeout: float = _FILES
    ) -> AsyncGenerator[bytes, None]:
        """Yield a job's output; at most ``_STREAM`` bytes are buffered. Closing the generator kills the job."""
        output = OutputQueue(_STREAM)
        call = self._request(what, operation, paths, output.take, _STREAM, number=number, timeout=timeout)
        output.attach(call)
        try:
            async for _, data in output:
                yield data
            _checked(await call.done, what)
        finally:
            await call.cancel()

    def _request(
        self,
        what: str,
        operation: str,
        paths: Sequence[str],
        take: Any = lambda *_: None,
        window: int = 1 << 16,
        timeout: float = _FILES,
        **more: Any,
    ) -> Call:
        """Start a file operation; ``take`` gets its output, other than short answers, which are part of the result."""
        return self._connection.run(
            what, operation, [os.fsencode(path) for path in paths], take=take, window=window, timeout=timeout, **more
        )

    # The sandbox itself

    async def stats(self) -> Stats:
        done = await self._files("read statistics", "stats", [self._workdir])
        try:
            numbers = [int(word) for word in done.stdout.split()]
            memory, limit, cpu, processes, oom, used, size = (None if n < 0 else n for n in numbers)
        except ValueError:
            raise self._violated("the agent sent malformed statistics") from None
        return Stats(memory, limit, None if cpu is None else cpu / 1e6, processes, oom, used, size)

    async def ping(self, timeout: float) -> float:
        return await self._connection.ping(timeout)

    def lose(self, reason: str) -> None:
        """End the connection because the sandbox is lost."""
        self._connection.drop(reason)

    async def close(self) -> None:
        self._connection.drop("closed")

    def _violated(self, message: str) -> ProtocolError:
        """Drop the connection to an agent that violates the protocol, and return the error."""
        error = ProtocolError(message)
        self._connection.drop("agent_dead", error)
        return error

    def _send_heartbeat(self) -> None:
        if not self.lost.done():
            self._connection.nudge()
            self._connection.loop.call_later(self._heartbeat, self._send_heartbeat)

    # Connections out of the sandbox

    async def relays(self) -> AsyncIterator[RelayStream]:
        """Yield connections to the relay port until the channel ends. Only one iteration at a time."""
        queue = self._relays = self._relays or asyncio.Queue()
        self._connection.check()
        self._connection.accept_relays(self._relay)
        while True:
            arrival = asyncio.ensure_future(queue.get())
            try:
                await asyncio.wait([arrival, self.lost], return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():
                    return
                yield arrival.result()
            finally:
                arrival.cancel()

    def _relay(self, id: int) -> Call:
        output = OutputQueue(WINDOW)
        call = Call(self._connection, id, "a relayed connection", WINDOW, output.take)
        output.attach(call)
        assert self._relays is not None
        self._relays.put_nowait(
            RelayStream(call, output, lambda closed: self._connection.settle_relay(call, closed=closed))
        )
        return call


class AgentListener:
    """A socket in a sandbox's directory that accepts the agent with the right nonce."""

    def __init__(self, path: Path, nonce: str, channel: Callable[[AgentConnection], AgentChannel]) -> None:
        self._path, self._nonce, self._channel = path, nonce, channel
        self._server: asyncio.AbstractServer | None = None
        self._arrived: asyncio.Future[AgentConnection] = asyncio.get_running_loop().create_future()
        self._pending: set[AgentConnection] = set()
        self._refused: list[str] = []

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            # Through an open directory, since the path may exceed the length of a socket address.
            directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                listener.bind(f"/proc/self/fd/{directory}/{self._path.name}")
            finally:
                os.close(directory)
            self._path.chmod(0o666)  # for the sandbox's user; the root directory is closed to others
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._protocol, sock=listener, backlog=_PENDING)
        except BaseException:
            listener.close()
            self._path.unlink(missing_ok=True)
            raise

    async def accept(self, timeout: float) -> AgentChannel:
        """Return the agent's channel and close the listener. Raises ``StartTimeout`` after ``timeout`` seconds."""
        try:
            connection = await asyncio.wait_for(asyncio.shield(self._arrived), timeout)
            hide_nonce(self._path.parent)
            return self._channel(connection)
        except asyncio.TimeoutError:
            message = f"no agent connected to {self._path} within {timeout:g} s{self.refused}"
            raise StartTimeout(message, phase="agent") from None
        finally:
            await self.close()

    @property
    def refused(self) -> str:
        """Why peers were refused, as the end of a message; may be empty."""
        return f"; refused: {', '.join(self._refused)}" if self._refused else ""

    async def close(self) -> None:
        """Stop listening and close pending connections; an accepted channel stays open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        for connection in list(self._pending):
            connection.drop("closed")
        self._pending.clear()
        if not self._arrived.done():
            self._arrived.cancel()

    async def __aenter__(self) -> AgentListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _protocol(self) -> AgentConnection:
        connection = AgentConnection(self._nonce, self._hello, self._refuse)
        if len(self._pending) >= _PENDING:
            connection.loop.call_soon(connection.drop, "closed")
            return connection
        self._pending.add(connection)
        connection.loop.call_later(_HELLO, self._greeting_timeout, connection)
        return connection

    def _greeting_timeout(self, connection: AgentConnection) -> None:
        if connection in self._pending:
            self._refuse(connection, f"it sent no greeting for {_HELLO:g} s")
            connection.drop("closed")

    def _hello(self, connection: AgentConnection) -> None:
        self._pending.discard(connection)
        if self._arrived.done():
            connection.drop("closed")
        else:
            self._arrived.set_result(connection)

    def _refuse(self, connection: AgentConnection, why: str) -> None:
        self._pending.discard(connection)
        if len(self._refused) < _PENDING:
            self._refused.append(why)


async def listen(
    directory: Path,
    nonce: str,
    *,
    isolation: str = "container",
    workdir: str = "/",
    idle_timeout: float | None = None,
) -> AgentListener:
    """Listen in a prepared directory for its sandbox's agent, which checks for new sockets about once a second.

    Several hosts may listen at once (the owner, a command line, a resumed run); an agent serves four of them.

    Args:
        directory: the sandbox's directory.
        nonce: secret of the agent's start.
        isolation: see ``Channel.isolation``.
        workdir: the directory whose disk space ``stats`` reports.
        idle_timeout: seconds without contact after which the agent exits; heartbeats of the channel prevent that.
    """
    heartbeat = _HEARTBEAT if idle_timeout is None else min(_HEARTBEAT, idle_timeout / 4)
    channel = functools.partial(AgentChannel, isolation=isolation, workdir=workdir, heartbeat=heartbeat)
    listener = AgentListener(directory / f"{secrets.token_hex(6)}.sock", nonce, channel)
    await listener.start()
    return listener


def _entry(text: bytes, directory: str | None) -> FileInfo:
    match = _ENTRY.fullmatch(text)
    if match is None or (directory is not None and (b"/" in match[5] or match[5] in (b".", b".."))):
        raise ProtocolError("the agent sent a malformed file entry")
    name = os.fsdecode(match[5])
    path = name if directory is None else f"{directory.rstrip('/')}/{name}"
    return FileInfo(path, _KINDS[match[1]], int(match[2]), int(match[3]) & 0o7777, int(match[4]) / 1e9)


def _checked(done: JobResult, what: str) -> JobResult:
    """Raise if a file operation timed out."""
    if done.flags & 1:
        raise SandboxError(f"the sandbox could not {what} in time; it may be overloaded, or a file system hangs")
    return done
