"""Everything hot in a sandbox that has an agent: one socket, many requests at once.

Invariant: the host listens and the agent comes; who does not show the nonce of this start is sent away. A request is
sent once and never again; its answer, the loss of the connection or a watchdog ends it. Cancelling a caller kills what
it had started before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import FileTooLarge, ProtocolError, SandboxError, SandboxLost, StartTimeout, UnsupportedFeature
from agentkit.sandboxes.agent_config import heartbeat, hide_nonce
from agentkit.sandboxes.agent_link import WINDOW, Done, Exchange, Link
from agentkit.sandboxes.agent_streams import AgentProcess, Flow, RelayStream, result
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats, Stream

if TYPE_CHECKING:
    from agentkit.sandboxes.egress import Egress

_STREAM = 1 << 20
"""Bytes of a stream that may be under way."""
ENTRIES = 100_000
"""Entries that a directory may have to be listed."""
_FILES = 60.0
"""Seconds that work on files may take."""
_ARCHIVE = 600.0
_HELLO = 5.0
_PENDING = 8
_ENTRY = re.compile(rb"([fdlo]) (\d{1,19}) (\d{1,4}) (-?\d{1,20}) (.+)", re.DOTALL)
_KINDS: dict[bytes, Any] = {b"f": "file", b"d": "directory", b"l": "symlink", b"o": "other"}


class AgentChannel(Channel):
    """The hot path to one start of one sandbox; ``listen`` makes it.

    ``boot`` names the agent's start: two channels of the same ``boot`` lead to the same processes.
    """

    def __init__(self, link: Link, isolation: str, *, workdir: str, heartbeat: float) -> None:
        self._link = link
        self.isolation = isolation
        self.lost = link.lost
        self.boot = (link.boot or b"").decode("ascii", "replace")
        self._workdir = workdir
        self._heartbeat = heartbeat
        self._relays: asyncio.Queue[RelayStream] | None = None
        self.egress: Egress | None = None
        """The proxy that serves ``relays``, with its counts, where the network has an allow-list."""
        self._beat()

    @property
    def heard(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._link.heard

    # Commands

    async def exec(self, request: ExecRequest) -> ExecResult:
        kept: dict[Stream, Capture] = {"stdout": Capture(request.output_limit), "stderr": Capture(request.output_limit)}
        exchange = self._start("exec", request, 2 * request.output_limit, lambda stream, data: kept[stream].feed(data))
        try:
            done = await asyncio.shield(exchange.done)
        except asyncio.CancelledError:
            await exchange.cancel()
            raise
        except SandboxLost as error:
            error.details.update(stdout=kept["stdout"].value(), stderr=kept["stderr"].value())
            raise
        return result(done, kept["stdout"], kept["stderr"])

    async def spawn(self, request: ExecRequest) -> Process:
        """As in ``Channel``; standard input stays open after ``request.stdin``. Keys are for ``exec`` alone."""
        if request.idempotency_key:
            raise UnsupportedFeature("spawn takes no idempotency key: its output goes to one reader, once")
        window = max(1, min(request.output_limit, _STREAM))
        flow = Flow(window)
        exchange = self._start("spawn", request, window, flow.take)
        flow.attach(exchange)
        try:
            await asyncio.wait([exchange.started, exchange.done], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await exchange.cancel()
            raise
        if exchange.started.cancelled():
            error = ProtocolError(f"the agent reported the end of what it had not started: {exchange.what}")
            self._link.drop("agent_dead", error)
            raise error
        exchange.started.result()
        return AgentProcess(exchange, flow, request.output_limit)

    def _start(self, operation: str, request: ExecRequest, room: int, take: Any) -> Exchange:
        return self._link.run(
            f"{request.argv[0]!r} in {request.cwd}",
            operation,
            [os.fsencode(word) for word in request.argv],
            env=[os.fsencode(f"{name}={value}") for name, value in request.env.items()],
            cwd=request.cwd,
            timeout=request.timeout,
            room=room,
            limit=request.output_limit if operation == "exec" else room,
            key=request.idempotency_key or "",
            stdin=request.stdin,
            more_input=operation == "spawn",
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
                    error = ProtocolError(f"the agent sent more than it was asked for: read {path}")
                    self._link.drop("agent_dead", error)
                    raise error
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
            raise ProtocolError("the agent described a file as none can be")
        return sorted(found, key=lambda info: info.path)

    async def stat(self, path: str) -> FileInfo | None:
        done = await self._files(f"look at {path}", "stat", [path])
        return _entry(done.stdout.rstrip(b"\0"), None) if done.stdout else None

    async def remove(self, path: str) -> None:
        await self._files(f"remove {path}", "remove", [path], timeout=_ARCHIVE)

    async def mkdir(self, path: str) -> None:
        await self._files(f"make directory {path}", "mkdir", [path])

    async def pack(self, paths: Sequence[str], timeout: float = _ARCHIVE) -> AsyncIterator[bytes]:
        """A tar archive of directories, made in the sandbox, piece by piece; sockets are left out.

        Its content is the sandbox's word: store it, never unpack it on the host. Raises ``PathError``.
        """
        what = f"pack {', '.join(paths)}"
        async with contextlib.aclosing(self._pieces(what, "pack", paths, timeout=timeout)) as pieces:
            async for data in pieces:
                yield data

    async def unpack(self, paths: Sequence[str], archive: AsyncIterable[bytes], timeout: float = _ARCHIVE) -> None:
        """Put an archive that ``pack`` made of ``paths`` in place of what these directories hold now.

        Raises ``PathError``, ``DiskFull``, and ``SandboxError`` for an archive of anything else.
        """
        exchange = self._request(
            f"unpack into {', '.join(paths)}", "unpack", paths, _ignore, 1, timeout=timeout, more_input=True
        )
        try:
            try:
                async for data in archive:
                    exchange.feed(data)
                    await exchange.drained()
            except BrokenPipeError:
                pass  # Its answer says why.
            exchange.end_input()
            _finished(await asyncio.shield(exchange.done), exchange.what)
        finally:
            await exchange.cancel()

    async def _files(self, what: str, operation: str, paths: Sequence[str], **arguments: Any) -> Done:
        exchange = self._request(what, operation, paths, _ignore, 1 << 16, **arguments)
        try:
            return _finished(await asyncio.shield(exchange.done), what)
        except asyncio.CancelledError:
            await exchange.cancel()
            raise

    async def _pieces(
        self, what: str, operation: str, paths: Sequence[str], number: int = 0, timeout: float = _FILES
    ) -> AsyncGenerator[bytes, None]:
        """What a job sends, as the reader takes it; at most ``_STREAM`` bytes wait here. Leaving kills the job."""
        flow = Flow(_STREAM)
        exchange = self._request(what, operation, paths, flow.take, _STREAM, number=number, timeout=timeout)
        flow.attach(exchange)
        try:
            async for _, data in flow:
                yield data
            _finished(await exchange.done, what)
        finally:
            await exchange.cancel()

    def _request(
        self,
        what: str,
        operation: str,
        paths: Sequence[str],
        take: Any,
        room: int,
        timeout: float = _FILES,
        **more: Any,
    ) -> Exchange:
        return self._link.run(
            what, operation, [os.fsencode(path) for path in paths], take=take, room=room, timeout=timeout, **more
        )

    # The sandbox itself

    async def stats(self) -> Stats:
        done = await self._files("count what is used", "stats", [self._workdir])
        try:
            numbers = [int(word) for word in done.stdout.split()]
            memory, limit, cpu, processes, oom, used, size = (None if n < 0 else n for n in numbers)
        except ValueError:
            error = ProtocolError("the agent sent statistics that are none")
            self._link.drop("agent_dead", error)
            raise error from None
        return Stats(memory, limit, None if cpu is None else cpu / 1e6, processes, oom, used, size)

    async def ping(self, timeout: float) -> float:
        return await self._link.ping(timeout)

    def lose(self, reason: str) -> None:
        """Say that the sandbox is gone before the socket does: ``reason`` as in ``SandboxLost``."""
        self._link.drop(reason)

    async def close(self) -> None:
        self._link.drop("closed")

    def _beat(self) -> None:
        if not self.lost.done():
            self._link.nudge()
            self._link.loop.call_later(self._heartbeat, self._beat)

    # Connections out of the sandbox

    async def relays(self) -> AsyncIterator[RelayStream]:
        """Connections to the relay port, as they are made; ends with the connection. One iteration at a time."""
        queue = self._relays = self._relays or asyncio.Queue()
        self._link.check()
        self._link.accept_relays(self._relay)
        while True:
            arrival = asyncio.ensure_future(queue.get())
            try:
                await asyncio.wait([arrival, self.lost], return_when=asyncio.FIRST_COMPLETED)
                if not arrival.done():
                    return
                yield arrival.result()
            finally:
                arrival.cancel()

    def _relay(self, id: int) -> Exchange:
        flow = Flow(WINDOW)
        exchange = Exchange(self._link, id, "a relayed connection", WINDOW, flow.take)
        flow.attach(exchange)
        assert self._relays is not None
        self._relays.put_nowait(
            RelayStream(exchange, flow, lambda closed: self._link.settle_relay(exchange, closed=closed))
        )
        return exchange


class AgentListener:
    """A socket in a sandbox's directory, until the agent with the nonce has come. Close it, or ``async with`` it."""

    def __init__(self, path: Path, nonce: str, isolation: str, workdir: str, heartbeat: float) -> None:
        self._path, self._nonce, self._isolation, self._workdir = path, nonce, isolation, workdir
        self._heartbeat = heartbeat
        self._server: asyncio.AbstractServer | None = None
        self._arrived: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._pending: set[Link] = set()
        self._refused: list[str] = []

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            # The path may be longer than an address can be; a name below an open directory never is.
            directory = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                listener.bind(f"/proc/self/fd/{directory}/{self._path.name}")
            finally:
                os.close(directory)
            self._path.chmod(0o666)  # The sandbox runs as another user; the root above is closed to all others.
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._protocol, sock=listener, backlog=_PENDING)
        except BaseException:
            listener.close()
            self._path.unlink(missing_ok=True)
            raise

    async def accept(self, timeout: float) -> AgentChannel:
        """The agent's channel; the listener is closed then. Raises ``StartTimeout`` after ``timeout`` seconds."""
        try:
            link = await asyncio.wait_for(asyncio.shield(self._arrived), timeout)
            hide_nonce(self._path.parent)
            return AgentChannel(link, self._isolation, workdir=self._workdir, heartbeat=self._heartbeat)
        except asyncio.TimeoutError:
            message = f"no agent came to {self._path} within {timeout:g} s{self.refused}"
            raise StartTimeout(message, phase="agent") from None
        finally:
            await self.close()

    @property
    def refused(self) -> str:
        """Why callers were sent away, as the end of a message; empty if none was."""
        return f"; refused: {', '.join(self._refused)}" if self._refused else ""

    async def close(self) -> None:
        """Stop listening and send away whoever waits; an accepted channel stays. Twice is fine."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        for link in list(self._pending):
            link.drop("closed")
        self._pending.clear()
        if not self._arrived.done():
            self._arrived.cancel()

    async def __aenter__(self) -> AgentListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _protocol(self) -> Link:
        link = Link(self._nonce, self._hello, self._refuse)
        if len(self._pending) >= _PENDING:
            link.loop.call_soon(link.drop, "closed")
            return link
        self._pending.add(link)
        link.loop.call_later(_HELLO, self._hurry, link)
        return link

    def _hurry(self, link: Link) -> None:
        if link in self._pending:
            self._refuse(link, f"it said nothing for {_HELLO:g} s")
            link.drop("closed")

    def _hello(self, link: Link) -> None:
        self._pending.discard(link)
        if self._arrived.done():
            link.drop("closed")
        else:
            self._arrived.set_result(link)

    def _refuse(self, link: Link, why: str) -> None:
        self._pending.discard(link)
        if len(self._refused) < _PENDING:
            self._refused.append(why)


async def listen(directory: Path, nonce: str, *, isolation: str = "container", workdir: str = "/") -> AgentListener:
    """Listen in a prepared directory for its sandbox's agent, which looks for new sockets about once a second.

    ``workdir`` is the place in the sandbox whose disk space its statistics tell. Several may listen there at once (the
    owner, a command line, a resumed run); an agent serves four of them.
    """
    listener = AgentListener(
        directory / f"{secrets.token_hex(6)}.sock", nonce, isolation, workdir, heartbeat(directory)
    )
    await listener.start()
    return listener


def _entry(text: bytes, directory: str | None) -> FileInfo:
    match = _ENTRY.fullmatch(text)
    if match is None or (directory is not None and (b"/" in match[5] or match[5] in (b".", b".."))):
        raise ProtocolError("the agent described a file as none can be")
    name = os.fsdecode(match[5])
    path = name if directory is None else f"{directory.rstrip('/')}/{name}"
    return FileInfo(path, _KINDS[match[1]], int(match[2]), int(match[3]) & 0o7777, int(match[4]) / 1e9)


def _finished(done: Done, what: str) -> Done:
    """Raises if work on files was cut short."""
    if done.flags & 1:
        raise SandboxError(f"the sandbox could not {what} in time: is it starved, or does a file system hang?")
    return done


def _ignore(_: Stream, __: bytes) -> None:
    """Answers of a few bytes come with the end of the job."""
