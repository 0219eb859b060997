"""Sandbox servers in processes of their own, which stand for hosts.

Invariant: `stop_all` ends every server that was started, also a stopped one.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

from agentkit.sandboxes.server.auth import TOKEN

START_TIMEOUT = 60.0


class Server:
    """`agentkit sandbox serve` on this machine, on a port that it keeps."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = 0
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def host(self) -> str:
        """Name of the host, as sandboxes on it report it."""
        return self.url.partition("://")[2].rstrip("/")

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "agentkit", "sandbox", "serve", "--port", str(self._port)]
        with (self._directory / "errors.txt").open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        timer = threading.Timer(START_TIMEOUT, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        timer.cancel()
        if "http" not in line:
            raise RuntimeError(f"a server did not start: {(self._directory / 'errors.txt').read_text()[-2000:]}")
        self.url = line.split()[-1]
        self._port = int(self.url.rstrip("/").rpartition(":")[2])

    def fail(self, how: Literal["refused", "silent"]) -> None:
        """Kill the process, so that its port refuses connections, or stop it, so that it answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL if how == "refused" else signal.SIGSTOP)

    def bring_back(self) -> None:
        """Continue a stopped server; start a killed one again, on the same port."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        else:
            self.start()

    def stop(self) -> None:
        """End it as an operator does, and wait for it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_all(number: int, directory: Path) -> list[Server]:
    """Start servers that share one new token, which this process uses too."""
    os.environ[TOKEN] = secrets.token_hex(32)
    servers = [Server(directory / str(index)) for index in range(number)]
    try:
        for server in servers:
            server.start()
    except BaseException:
        stop_all(servers)
        raise
    return servers


def stop_all(servers: list[Server]) -> None:
    for server in servers:
        server.stop()
