"""Sandbox servers in separate processes, and a relay in front of a server that can stop forwarding."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

TOKEN = "a-token-of-the-tests-alone"


class ServerProcess:
    """A server in a separate process, which can be stopped and killed.

    Args:
        directory: the runtime directory of the server.
        backend: an expression for its back end.
        before: statements that the process executes first.
        port: the port; 0 chooses a free one.
    """

    def __init__(self, directory: Path, backend: str = "FakeBackend()", *, before: str = "", port: int = 0) -> None:
        code = (
            "from agentkit.sandboxes.server.app import serve\n"
            "from agentkit.sandboxes.testing.fake import FakeBackend\n"
            f"{before}\n"
            f"serve({backend}, port={port}, announce=lambda url: print(url, flush=True))"
        )
        environment = {**os.environ, "AGENTKIT_SANDBOX_TOKEN": TOKEN, "AGENTKIT_RUNTIME_DIR": str(directory)}
        self._popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        assert self._popen.stdout is not None
        self.url = self._popen.stdout.readline().strip()
        self.host = self.url.removeprefix("http://")

    @property
    def memory(self) -> int:
        """Return the bytes that the server holds in memory."""
        return psutil.Process(self._popen.pid).memory_info().rss

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> int:
        if self._popen.returncode is not None:
            return self._popen.returncode
        self._popen.send_signal(number)
        self._popen.send_signal(signal.SIGCONT)
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        return self._popen.wait(60)


class Relay:
    """A TCP relay. While it is stalled, it accepts connections but forwards nothing."""

    def __init__(self, target: str) -> None:
        self._target = target.rpartition(":")
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    def stall(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection(self._target[0], int(self._target[2]))
            pumps = [asyncio.ensure_future(self._pump(*ends)) for ends in ((reader, back), (there, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the other side sees the end
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


@contextlib.asynccontextmanager
async def relayed(target: str) -> AsyncIterator[Relay]:
    """Relay connections to the server at ``target`` (``host:port``)."""
    relay = Relay(target)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    relay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
