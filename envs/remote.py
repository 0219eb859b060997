"""The host's end of a process that serves environments in a sandbox.

Invariant: every call ends, with a checked answer or a typed error. Whatever comes from the process is hostile: a byte
out of order ends it. Once broken it stays broken: its calls raise what broke it, and nothing of it is used again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from agentkit.envs import frames
from agentkit.errors import AgentkitError, EnvContractError, EnvCrashed, EnvTimeout, RegistryError, SandboxError
from agentkit.sandboxes.attribution import Cause, cause_of
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.text import printable

_LIFE = 30 * 86400.0
"""Seconds that a process may live; its sandbox ends it earlier."""
_STDERR_LIMIT = 4000
_TEXT_LIMIT = 20_000
_FAILURES: dict[str, type[Exception]] = {
    "crashed": EnvCrashed,
    "contract": EnvContractError,
    "refused": RegistryError,
    "unsupported": NotImplementedError,
}


class InSandbox(Exception):
    """The traceback from inside the sandbox, as text: the cause of the error that was raised for it."""

    def __str__(self) -> str:
        return f"\n\nin the sandbox:\n{printable(self.args[0])}"


class EnvProcess:
    """A process that serves environments, told apart by their seat. ``start`` makes it."""

    def __init__(self, process: Process, box: Sandbox) -> None:
        self.broken: AgentkitError | None = None
        """What broke it; None while it works."""
        self._process, self._box = process, box
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._stderr = bytearray()
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, box: Sandbox, command: Sequence[str]) -> EnvProcess:
        """Raises ``SandboxError``."""
        return cls(await box.spawn(command, timeout=_LIFE, output_limit=1 << 20), box)

    async def call(self, seat: int, name: str, *arguments: Any, timeout: float) -> Any:
        """The answer of an environment, not checked beyond its being plain data or a picture.

        Raises ``EnvCrashed``, ``EnvTimeout`` (which breaks the process), ``EnvContractError``, ``RegistryError``,
        ``NotImplementedError``, and ``ValueError`` for arguments that cannot be sent. Others may call at the same time;
        a call that is cancelled still happens, and the next one waits for it.
        """
        if self.broken is not None:
            raise self._again()
        self._calls += 1
        number = self._calls
        try:
            request = frames.message([number, seat, name, *arguments])
        except frames.FrameError as error:
            raise ValueError(f"{name} cannot be sent into a sandbox: {error}") from None
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, name, timeout)
        try:
            await self._process.write(request)
        except (SandboxError, BrokenPipeError):
            pass  # the reader learns of it, and why
        except BaseException:
            self._break(EnvCrashed(f"{name} was interrupted"))
            raise
        try:
            with self._box.watched():
                return await reply  # after a cancellation, the answer is dropped when it comes
        finally:
            timer.cancel()

    async def cause(self) -> Cause:
        """What broke it, as far as the engine knows; ask before its sandbox is given up. Takes at most 5 s."""
        error = self.broken.__cause__ if self.broken is not None else None
        return await cause_of(error if isinstance(error, SandboxError) else EnvCrashed("broken"), self._box)

    async def close(self) -> None:
        """End the process. Twice is fine; bounded in time by the sandbox's own limits."""
        self._break(EnvCrashed("the environment is closed"))
        self._reader.cancel()
        await asyncio.wait({self._reader})
        with contextlib.suppress(SandboxError, OSError):
            await self._process.kill()

    async def _read(self) -> None:
        unpacker = frames.Unpacker()
        try:
            async for stream, data in self._process:
                if stream == "stderr":
                    self._stderr += data
                    del self._stderr[:-_STDERR_LIMIT]
                else:
                    for kind, content in unpacker.feed(data):
                        self._settle(kind, content)
            result = await self._process.wait()
            how = "was killed for its memory" if result.oom_killed else f"ended with {result.exit_code}"
            self._break(EnvCrashed(f"the environment's process {how}: {self._said()}"))
        except frames.FrameError as error:
            self._break(EnvContractError(f"the environment's process sent {error}"))
        except SandboxError as error:
            self._break(EnvCrashed(f"the environment's sandbox is gone: {error}"), error)
        finally:
            self._break(EnvCrashed("the environment's process is not read any more"))

    def _settle(self, kind: int, content: bytes) -> None:
        """Give an answer to whoever waits for it. Raises ``FrameError`` for one that nobody waits for."""
        if kind == frames.PICTURE:
            number, pixels = frames.pictured(content)
            self._give(number, pixels)
            return
        match frames.parsed(content):
            case [int(number), "ok", value]:
                self._give(number, value)
            case [int(number), str(what), str(message), str(trace)] if what in _FAILURES:
                error = _FAILURES[what](message[:_TEXT_LIMIT])
                if trace:
                    error.__cause__ = InSandbox(trace[:_TEXT_LIMIT])
                self._give(number, error)
            case other:
                raise frames.FrameError(f"what is no answer: {repr(other)[:200]}")

    def _give(self, number: int, outcome: Any) -> None:
        waiter = self._waiting.pop(number, None)
        if waiter is None:
            raise frames.FrameError(f"an answer to request {number}, which nobody made")
        if waiter.done():
            return  # cancelled
        if isinstance(outcome, Exception):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)

    def _expire(self, name: str, timeout: float) -> None:
        self._break(EnvTimeout(f"{name} took longer than {timeout:g} s; its sandbox is replaced"))

    def _break(self, error: AgentkitError, cause: BaseException | None = None) -> None:
        """Nothing more is asked of this process; everybody who waits gets ``error``."""
        if self.broken is None:
            error.__cause__ = cause
            self.broken = error
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(self._again())
                waiter.exception()  # seen: a call that was interrupted does not look any more
        self._waiting.clear()

    def _again(self) -> AgentkitError:
        """What broke it, as an error of its own: one that is raised in two places would grow two tracebacks."""
        assert self.broken is not None
        error = type(self.broken)(str(self.broken))
        error.__cause__ = self.broken.__cause__
        return error

    def _said(self) -> str:
        return self._stderr.decode("utf-8", "replace").strip()[-2000:] or "it said nothing"
