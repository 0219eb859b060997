"""The host's side of a process that serves environments in a sandbox.

Invariant: every call ends with a reply or a typed error. The process is not trusted: an invalid byte ends it. A broken
process stays broken: its calls raise the error that broke it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from agentkit.envs.framing import FrameError, FrameReader
from agentkit.envs.isolation import protocol
from agentkit.errors import (
    AgentkitError,
    EnvContractError,
    EnvCrashed,
    EnvTimeout,
    RegistryError,
    SandboxError,
    SandboxLost,
)
from agentkit.sandboxes.attribution import Cause, cause_of
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.text import printable

_PROCESS_TIMEOUT = 30 * 86400.0
"""Seconds that a process may run; its sandbox ends earlier."""
_STDERR_LIMIT = 4000
_TEXT_LIMIT = 20_000
_FAILURES: dict[str, type[Exception]] = {
    "crashed": EnvCrashed,
    "contract": EnvContractError,
    "refused": RegistryError,
    "unsupported": NotImplementedError,
}


class RemoteTraceback(Exception):
    """The traceback inside the sandbox, as text; the cause of the error that the host raises."""

    def __str__(self) -> str:
        return f"\n\nin the sandbox:\n{printable(self.args[0])}"


class EnvProcess:
    """A process that serves environments, identified by numbers. Create it with ``start``."""

    def __init__(self, process: Process, box: Sandbox) -> None:
        self.broken: AgentkitError | None = None
        """The error that broke it; None while it works."""
        self.on_broken: list[Callable[[], None]] = []
        """Called once when it breaks; must neither block nor raise."""
        self._process, self._box = process, box
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._calls = 0
        self._stderr = bytearray()
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, box: Sandbox, command: Sequence[str]) -> EnvProcess:
        """Start ``command`` in a sandbox. Raises ``SandboxError``."""
        return cls(await box.spawn(command, timeout=_PROCESS_TIMEOUT, output_limit=1 << 20), box)

    async def call(self, env: int, name: str, *arguments: Any, timeout: float) -> Any:
        """Call an environment. Concurrent calls are answered one after the other.

        A cancelled call is still executed, and the next one waits for it.

        Args:
            env: number of the environment.
            name: of the request.
            arguments: plain data.
            timeout: seconds, after which the process is broken.

        Returns:
            The reply: plain data or a picture, not validated any further.

        Raises:
            EnvCrashed, EnvTimeout, EnvContractError, RegistryError, NotImplementedError: the call failed.
            ValueError: the arguments cannot be sent.
        """
        if self.broken is not None:
            raise self.error()
        self._calls += 1
        number = self._calls
        try:
            request = protocol.encode([number, env, name, *arguments])
        except FrameError as error:
            raise ValueError(f"{name} cannot be sent into a sandbox: {error}") from None
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, name, timeout)
        try:
            await self._process.write(request)
        except (SandboxError, BrokenPipeError):
            pass  # the reader sees the cause
        except BaseException:
            self._break(EnvCrashed(f"{name} was interrupted"))
            raise
        try:
            with self._box.watched():
                return await reply  # after a cancellation, a late reply is dropped
        finally:
            timer.cancel()

    @property
    def busy(self) -> bool:
        """Whether a call is not answered yet."""
        return bool(self._waiting)

    def lose(self, reason: str) -> None:
        """Break it, because its sandbox is lost. ``reason``: one of ``LOSS_REASONS``."""
        lost = SandboxLost(f"sandbox {self._box.id} is lost: {reason}", reason=reason)
        self._break(EnvCrashed(f"the environment's sandbox is lost: {reason}"), lost)

    def reject(self, error: EnvContractError) -> None:
        """Break it, because its reply is not valid."""
        self._break(error)

    async def cause(self) -> Cause:
        """Return what broke it, as far as the engine knows. Takes at most 5 s; call it before removal."""
        error = self.broken.__cause__ if self.broken is not None else None
        return await cause_of(error if isinstance(error, SandboxError) else EnvCrashed("broken"), self._box)

    async def close(self) -> None:
        """End the process, within the sandbox's own time limits. Idempotent."""
        self._break(EnvCrashed("the environment is closed"))
        self._reader.cancel()
        await asyncio.wait({self._reader})
        with contextlib.suppress(SandboxError, OSError):
            await self._process.kill()

    async def _read(self) -> None:
        reader = FrameReader(protocol.LIMITS)
        try:
            async for stream, data in self._process:
                if stream == "stderr":
                    self._stderr += data
                    del self._stderr[:-_STDERR_LIMIT]
                else:
                    for kind, content in reader.feed(data):
                        self._settle(kind, content)
            result = await self._process.wait()
            how = "was killed for its memory" if result.oom_killed else f"ended with {result.exit_code}"
            self._break(EnvCrashed(f"the environment's process {how}: {self._stderr_text()}"))
        except FrameError as error:
            self._break(EnvContractError(f"the environment's process sent {error}"))
        except SandboxError as error:
            self._break(EnvCrashed(f"the environment's sandbox is gone: {error}"), error)
        finally:
            self._break(EnvCrashed("the environment's process is no longer read"))

    def _settle(self, kind: int, content: bytes) -> None:
        """Deliver a reply to its call. Raises ``FrameError`` for a reply that no call waits for."""
        if kind == protocol.PICTURE:
            number, pixels = protocol.decode_picture(content)
            self._deliver(number, pixels)
            return
        match protocol.decode(content):
            case [int(number), "ok", value]:
                self._deliver(number, value)
            case [int(number), str(what), str(message), str(trace)] if what in _FAILURES:
                error = _FAILURES[what](message[:_TEXT_LIMIT])
                if trace:
                    error.__cause__ = RemoteTraceback(trace[:_TEXT_LIMIT])
                self._deliver(number, error)
            case other:
                raise FrameError(f"a message that is not a reply: {repr(other)[:200]}")

    def _deliver(self, number: int, outcome: Any) -> None:
        waiter = self._waiting.pop(number, None)
        if waiter is None:
            raise FrameError(f"a reply to request {number}, which was not made")
        if waiter.done():
            return  # cancelled
        if isinstance(outcome, Exception):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)

    def _expire(self, name: str, timeout: float) -> None:
        self._break(EnvTimeout(f"{name} took longer than {timeout:g} s; its sandbox is replaced"))

    def _break(self, error: AgentkitError, cause: BaseException | None = None) -> None:
        """Fail all waiting and future calls with ``error``."""
        if self.broken is not None:
            return
        error.__cause__ = cause
        self.broken = error
        for position, waiter in enumerate(self._waiting.values()):
            if not waiter.done():
                # The first call was being carried out and may be what broke it; the others waited for their turn.
                waiter.set_exception(self.error() if position == 0 else self._error_of_bystander())
                waiter.exception()  # marked as retrieved, because a cancelled call does not retrieve it
        self._waiting.clear()
        for callback in self.on_broken:
            callback()
        self.on_broken.clear()

    def error(self) -> AgentkitError:
        """Return a copy of the error that broke it, because raising one object twice would mix the tracebacks."""
        assert self.broken is not None
        error = type(self.broken)(str(self.broken))
        error.__cause__ = self.broken.__cause__
        return error

    def _error_of_bystander(self) -> AgentkitError:
        error = self.error()
        if not isinstance(error.__cause__, SandboxError):
            error = EnvCrashed(str(error))
            error.__cause__ = SandboxLost("another environment in the same process ended it", reason="exited")
        return error

    def _stderr_text(self) -> str:
        return self._stderr.decode("utf-8", "replace").strip()[-2000:] or "it wrote nothing to standard error"
