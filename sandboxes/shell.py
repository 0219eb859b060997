"""A shell session: working directory, variables and functions are kept between commands.

Invariant: the end of a command's output is marked by a random number, which no output can contain by chance; standard
input is empty, so that a command cannot consume the next one. Functions, aliases and traps that a command defines are
not used to run the next command or to print its end mark. A command that times out is interrupted as by Ctrl-C. If the
shell then does not answer, or has ended, a new shell replaces it and the result has ``session_restarted=True``.

The shell is interactive without a terminal: it survives an interrupt and discards the rest of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentkit.errors import CommandNotFound, SandboxError, SandboxLost
from agentkit.sandboxes import commands
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.output import Capture
from agentkit.sandboxes.tasks import finished, stopped
from agentkit.sandboxes.types import ExecResult, Stream

if TYPE_CHECKING:
    from agentkit.sandboxes.sandbox import Sandbox

START_TIMEOUT = 20.0
RESYNC_TIMEOUT = 1.0
"""Seconds that an interrupted shell has to answer before it is killed."""
_ASK_AGAIN = 0.25
_LIFE = 7 * 86400.0
_SIGINT, _SIGKILL = 2, 9

_BEST_SHELL = (
    "command -v bash >/dev/null 2>&1 && exec bash --norc --noprofile --noediting -i; exec sh -i"  # bash, if it exists
)
_QUIET = "set +o history; set +H"
"""For bash: no history, no expansion of exclamation marks."""


@dataclass(frozen=True)
class ShellResult(ExecResult):
    """Result of a shell command.

    Attributes:
        session_restarted: the shell ended or was killed; the next command runs in a new shell without the old state.
    """

    session_restarted: bool = False


class _Output:
    """One output stream of the shell, split by command."""

    def __init__(self) -> None:
        self._capture = Capture(0)
        self._pending = b""
        self._mark = re.compile(b"(?!)")
        self._last = ""
        self._longest = 0
        self.status: int | None = None
        self.complete = asyncio.Event()

    def expect(self, limit: int, nonce: str) -> None:
        """Start the output of a command that ends with the mark of ``nonce``."""
        self._capture = Capture(limit)
        # An interrupted shell may print the previous mark several times: drop it. Older marks cannot follow, since a
        # shell reads and answers in order.
        self._mark = _any_of(self._last, nonce)
        self._last = nonce
        self._longest = len(nonce) + 16
        self.status = None
        self.complete.clear()
        self.feed(b"")

    def expect_also(self, nonce: str) -> None:
        """Accept another end mark, for a command that was interrupted and may not print its own."""
        self._mark = re.compile(self._mark.pattern + b"|" + _any_of(nonce).pattern)
        self._last = nonce
        self.complete.clear()

    def feed(self, data: bytes) -> None:
        self._pending += data
        while not self.complete.is_set() and (match := self._mark.search(self._pending)):
            self._capture.feed(self._pending[: match.start()])
            self._pending = self._pending[match.end() :]
            if self._last.encode() in match[0]:
                digits = match[0].strip(b"\x1e").partition(b":")[2]
                self.status = int(digits) if digits else None
                self.complete.set()
        if self.complete.is_set():
            # Background output between two commands; bounded, and part of the next result.
            self._pending = self._pending[-65536:]
        else:
            # The tail may be the beginning of a mark; the rest is output.
            cut = max(0, len(self._pending) - self._longest)
            self._capture.feed(self._pending[:cut])
            self._pending = self._pending[cut:]

    def take(self) -> tuple[bytes, bool]:
        """Return the output of the command, and whether it was truncated."""
        if not self.complete.is_set():
            self._capture.feed(self._pending)
            self._pending = b""
        return self._capture.value(), self._capture.truncated


class Shell:
    """A shell session in a sandbox; use ``Sandbox.shell``. Commands run one at a time.

    Example:
        ```python
        async with box.shell() as shell:
            await shell.run("cd src && export DEBUG=1")
            result = await shell.run("make test", timeout=300)
        ```
    """

    def __init__(self, sandbox: Sandbox, *, cwd: str | None, env: Mapping[str, str] | None) -> None:
        self._sandbox = sandbox
        self._cwd = cwd
        self._env = {**(env or {}), "PS1": "", "PS2": ""}
        self._generation = sandbox.generation
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._outputs: dict[Stream, _Output] = {}
        self._ended = asyncio.Event()
        self._turn = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start the shell; called by ``Sandbox.shell``. Raises ``SandboxLost`` if it does not answer."""
        self._outputs = {"stdout": _Output(), "stderr": _Output()}
        self._ended = asyncio.Event()
        request = commands.request(
            self._sandbox.spec, _BEST_SHELL, cwd=self._cwd, env=self._env, timeout=_LIFE, output_limit=1 << 20
        )
        self._process = await self._sandbox.call(lambda channel: channel.spawn(request), "shell")
        self._reader = asyncio.ensure_future(self._read(self._process, self._outputs, self._ended))
        try:
            await self._send(f'[ -z "$BASH_VERSION" ] || {{ {_QUIET}; }}', 0)
            await self._until_complete(START_TIMEOUT)
        except BaseException:
            await finished(self._kill())
            raise
        if not self._complete:
            await finished(self._kill())
            raise SandboxLost(
                f"the shell in sandbox {self._sandbox.id} does not answer; check that its image has /bin/sh",
                reason="agent_dead",
            )

    async def run(
        self, cmd: str, *, timeout: float | None = None, output_limit: int | None = None, check: bool = False
    ) -> ShellResult:
        """Run a command in the shell, with empty standard input.

        Args:
            cmd: one or more lines of shell code.
            timeout: seconds until the command is interrupted. Default: ``spec.exec_timeout``.
            output_limit: bytes kept of each stream. Default: ``spec.output_limit``.
            check: raise an error if the command fails or times out.

        Raises:
            SandboxLost: the sandbox ended or was restarted, or the shell is closed.
            ExecTimeout: with ``check``: the command timed out.
            ExecFailed: with ``check``: the command failed.
        """
        if "\0" in cmd:
            raise CommandNotFound("a command cannot contain a NUL", argv=(cmd,))
        limit = self._sandbox.spec.output_limit if output_limit is None else output_limit
        seconds = self._sandbox.spec.exec_timeout if timeout is None else timeout
        if not 0 < seconds <= _LIFE:
            raise ValueError(f"timeout={timeout!r} must be a positive number of seconds, at most {_LIFE:g}")
        async with self._turn:
            self._check()
            with self._sandbox.busy("shell"):
                result = await self._run(cmd, seconds, limit)
        self._sandbox.note_result(result)
        if check:
            commands.check(result, repr(cmd[:200]), seconds)
        return result

    async def close(self) -> None:
        """End the shell and its commands. A second call does nothing."""
        self._closed = True
        await finished(self._kill())

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def _run(self, cmd: str, timeout: float, limit: int) -> ShellResult:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            # A shell that does not read has ended or will time out.
            with contextlib.suppress(BrokenPipeError, asyncio.TimeoutError):
                await asyncio.wait_for(self._send(_command(cmd), limit), timeout)
            await self._until_complete(start + timeout - loop.time())
            timed_out = not self._complete and not self._ended.is_set()
            if timed_out:
                await self._interrupt()
        except BaseException:
            await finished(self._recover())
            raise
        duration = loop.time() - start
        out, out_cut = self._outputs["stdout"].take()
        err, err_cut = self._outputs["stderr"].take()
        status, restarted, last = self._outputs["stdout"].status, not self._complete, None
        if restarted:
            last = await self._replace()
            status = last.exit_code if last is not None else None
        return ShellResult(
            exit_code=None if timed_out else status,
            stdout_bytes=out,
            stderr_bytes=err,
            duration=duration,
            timed_out=timed_out,
            truncated=out_cut or err_cut,
            oom_killed=last is not None and last.oom_killed,
            signal=status - 128 if not timed_out and status is not None and 128 < status <= 192 else None,
            tainted=last is not None and last.tainted,
            session_restarted=restarted,
        )

    async def _send(self, line: str, limit: int) -> None:
        """Send a line and the marks of its end; the prompt is reset afterwards."""
        assert self._process is not None
        nonce = secrets.token_hex(16)
        for output in self._outputs.values():
            output.expect(limit, nonce)
        await self._process.write(f"{line}; {_marks(nonce)}; PS1= PS2= PROMPT_COMMAND=\n".encode())

    async def _interrupt(self) -> None:
        """Interrupt the command, then request a mark until the shell answers or ``RESYNC_TIMEOUT`` ends."""
        assert self._process is not None
        nonce = secrets.token_hex(16)
        for output in self._outputs.values():
            output.expect_also(nonce)
        loop = asyncio.get_running_loop()
        end = loop.time() + RESYNC_TIMEOUT
        with contextlib.suppress(BrokenPipeError):
            await self._process.kill(_SIGINT)
            while not self._complete and not self._ended.is_set() and loop.time() < end:
                await self._process.write(f"{_marks(nonce)}\n".encode())
                await self._until_complete(_ASK_AGAIN)

    async def _recover(self) -> None:
        """After a cancellation: end the command, keep the shell if possible."""
        with contextlib.suppress(SandboxError):
            if not self._complete and not self._ended.is_set():
                await self._interrupt()
            if not self._complete:
                await self._replace()

    async def _replace(self) -> ExecResult | None:
        """Kill the shell and start another; return the old one's result, if known."""
        last = await self._kill()
        await self.start()
        return last

    async def _kill(self) -> ExecResult | None:
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if process is None:
            return None
        try:
            with contextlib.suppress(SandboxError):
                if not self._ended.is_set():
                    await process.kill(_SIGKILL)
                return await asyncio.wait_for(process.wait(), START_TIMEOUT)
        except asyncio.TimeoutError:
            return None
        finally:
            if reader is not None:
                await stopped([reader])
        return None

    @property
    def _complete(self) -> bool:
        return all(output.complete.is_set() for output in self._outputs.values())

    async def _until_complete(self, timeout: float) -> None:
        """Wait until both streams are complete, the shell has ended, or ``timeout`` seconds have passed."""

        async def both() -> None:
            for output in self._outputs.values():
                await output.complete.wait()

        waits = {asyncio.ensure_future(both()), asyncio.ensure_future(self._ended.wait())}
        try:
            await asyncio.wait(waits, timeout=max(timeout, 0.0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    @staticmethod
    async def _read(process: Process, outputs: Mapping[Stream, _Output], ended: asyncio.Event) -> None:
        try:
            async for stream, data in process:
                outputs[stream].feed(data)
        except SandboxError:
            pass  # the running command raises it
        finally:
            ended.set()

    def _check(self) -> None:
        if self._closed:
            raise SandboxLost("this shell is closed; start another with Sandbox.shell", reason="removed")
        if self._generation != self._sandbox.generation:
            raise SandboxLost(
                "this shell was lost when its sandbox restarted; start another with Sandbox.shell", reason="replaced"
            )
        if self._process is None:
            raise SandboxLost("this shell could not be restarted; start another with Sandbox.shell", reason="exited")


# In bash, POSIXLY_CORRECT enables the POSIX mode, in which functions cannot replace special builtins (eval, trap,
# unset), as in other shells. An assignment is not a command and cannot be replaced; a backslash disables aliases. A
# read-only variable cannot be undone: the shell then does not answer and is replaced.
_PLAIN = "POSIXLY_CORRECT=1"
_OWN = r"\unset POSIXLY_CORRECT"


def _command(cmd: str) -> str:
    """Return a line that runs ``cmd`` with empty standard input, independent of earlier definitions."""
    return rf"{_PLAIN}; \eval {shlex.quote(f'{_OWN}{chr(10)}{cmd}')} </dev/null"


def _marks(nonce: str) -> str:
    """Return code that prints the last status and the end marks of both streams."""
    return (
        rf"_agentkit=$? {_PLAIN}; \trap - DEBUG 2>/dev/null; \unset -f printf; "
        rf"""\printf '\036%s:%d\036' {nonce} "$_agentkit"; \printf '\036%s\036' {nonce} >&2; {_OWN}"""
    )


def _any_of(*nonces: str) -> re.Pattern[bytes]:
    """Return a pattern for the end mark of any of ``nonces``."""
    return re.compile(b"\x1e(?:%s)(?::[0-9]{1,3})?\x1e" % "|".join(filter(None, nonces)).encode())
