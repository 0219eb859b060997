"""Symbolic equality for environments that must not hang: the host's side of ``checker``.

Invariant: every question ends, with a verdict or with an ``EnvError``, whatever the expressions are. One process of a
program serves all its environments, and is started again if it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys

from agentkit.envs.shared import Share
from agentkit.errors import ConfigError, EnvCrashed, EnvTimeout
from agentkit.sandboxes.aio import finished

LONGEST = 1_000
"""Characters of an expression; longer ones equal nothing."""
_START_TIMEOUT = 120.0
_TIMEOUT = 60.0
"""Seconds of real time for what may take three of processor time."""
_ATTEMPTS = 2


def verifier() -> Share[Verifier]:
    """A share in this process's verifier. Raises ``ConfigError`` if ``math_verify`` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "comparing expressions needs math-verify: pip install 'agentkit-rl[math]' (for the sandboxes' image: "
            "agentkit sandbox build --package math-verify)"
        )
    return Share("math verifier", Verifier)


class Verifier:
    """Compares expressions in a process of its own, as many at a time as there are processors."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._number = 0
        self._places = asyncio.Semaphore(os.cpu_count() or 1)
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Raises ``EnvCrashed``, ``EnvTimeout``."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None and self._reader is not None:
                return
            await self.close()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _BOOT, json.dumps(sys.path),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            assert self._process.stdout is not None
            try:
                line = await asyncio.wait_for(self._process.stdout.readline(), _START_TIMEOUT)
            except asyncio.TimeoutError as error:
                await finished(self.close())
                raise EnvTimeout(f"math-verify was not loaded within {_START_TIMEOUT:g} s") from error
            except BaseException:
                await finished(self.close())
                raise
            if line != b'"ready"\n':
                await finished(self.close())
                raise EnvCrashed("the process that compares expressions did not start; its error is on stderr")
            self._reader = asyncio.ensure_future(self._read(self._process))

    async def close(self) -> None:
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the comparisons under way
            await process.wait()
        self._lose("the process that compares expressions was closed")

    async def equal(self, gold: str, answer: str) -> bool:
        """Whether two LaTeX expressions mean the same. Raises ``EnvCrashed``, ``EnvTimeout``."""
        if max(len(gold), len(answer)) > LONGEST:
            return False
        async with self._places:
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(EnvCrashed):
                    await self.start()
                    verdict = await self._ask(gold, answer)
                    if verdict != "failed":
                        return verdict == "equal"
        raise EnvCrashed(f"the process that compares expressions died {_ATTEMPTS} times")

    async def _ask(self, gold: str, answer: str) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        self._number += 1
        number, verdict = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = verdict
        try:
            self._process.stdin.write(json.dumps([number, gold, answer]).encode() + b"\n")
            return await asyncio.wait_for(verdict, _TIMEOUT)
        except asyncio.TimeoutError as error:
            raise EnvTimeout(f"comparing two expressions took longer than {_TIMEOUT:g} s") from error
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            number, verdict = json.loads(line)
            if number in self._waiting and not self._waiting[number].done():
                self._waiting[number].set_result(verdict)
        self._reader = None
        self._lose("the process that compares expressions died")

    def _lose(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EnvCrashed(why))


_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from agentkit.envs.math.checker import main; main()"
