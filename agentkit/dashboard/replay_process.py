"""Replays of the page, each in a process of its own.

Invariant: there is one replay at a time, and its process ends with the server: it ends when its standard input closes,
removes its sandbox, and is killed if that takes too long. What a killed process leaves is removed by the sandboxes'
reaper.

    python -m agentkit.dashboard.replay_process DIRECTORY EPISODE
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agentkit.dashboard.queries import to_json
from agentkit.errors import AgentkitError
from agentkit.text import printable

TIMEOUT = 180.0
"""Seconds that a replay may take."""
_END_S = 15.0
"""Seconds that a replay may take to remove its sandbox."""


class ReplayError(AgentkitError):
    """A replay cannot begin or was ended."""


class Replays:
    """Replays episodes, one at a time. May be used from several threads.

    Args:
        timeout: seconds that one may take.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._busy = self._closed = False

    def replay(self, path: Path, number: int) -> dict[str, Any]:
        """Return the result of ``agentkit.dashboard.replay.replay``.

        Raises:
            ReplayError: another one is running, or this one failed, took too long or was ended.
        """
        with self._lock:
            if self._closed or self._busy:
                raise ReplayError("another replay is running: wait until it has ended, and try again")
            command = [sys.executable, "-m", __name__, str(path.absolute()), str(number)]
            # In a session of its own, it outlives the Ctrl-C that ends the server, and can remove its sandbox.
            self._running = child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            self._busy = True
        try:
            return self._result(child)
        finally:
            _end(child)
            self._busy = False

    def close(self) -> None:
        """End the replay that is running; there is none afterwards. Idempotent."""
        with self._lock:
            self._closed, child = True, self._running
        if child is not None:
            _end(child)

    def _result(self, child: subprocess.Popen[str]) -> dict[str, Any]:
        output = child.stdout
        assert output
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(output.readline()), daemon=True)
        reader.start()
        reader.join(self._timeout)
        if reader.is_alive():
            raise ReplayError(f"the replay took more than {self._timeout:g} s and was ended")
        if self._closed or not lines or not lines[0].endswith("\n"):
            status = child.wait(_END_S) if not self._closed else None
            raise ReplayError("the replay was ended" if status is None else f"its process ended with status {status}")
        answer = json.loads(lines[0])
        if "error" in answer:
            raise ReplayError(answer["error"])
        return answer


def _end(child: subprocess.Popen[str]) -> None:
    """Ask a process to end by closing its standard input, and kill it if it does not."""
    assert child.stdin
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main(directory: str, number: str) -> None:
    """Replay an episode and print its result, or ``error``, as a line of JSON. End when standard input closes."""
    try:
        answer = asyncio.run(_until_eof(Path(directory), int(number)))
    except asyncio.CancelledError:
        return
    except AgentkitError as error:
        answer = {"error": str(error)}
    except Exception as error:  # a run can contain anything
        answer = {"error": printable(f"{type(error).__name__}: {error}")}
    print(to_json(answer), flush=True)


async def _until_eof(path: Path, number: int) -> dict[str, Any]:
    from agentkit.dashboard.replay import replay

    task, loop = asyncio.ensure_future(replay(path, number)), asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 1024):  # `sys.stdin` would be locked when the interpreter ends
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=watch, daemon=True).start()
    return await task


if __name__ == "__main__":
    main(*sys.argv[1:])
