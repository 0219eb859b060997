"""Sandbox servers in separate processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
