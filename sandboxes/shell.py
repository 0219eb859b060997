"""A shell that lives on between commands: working directory, variables and functions stay.

Invariant: a command's output and status end at a mark that holds a number nobody could know, so that no output can be
taken for it; standard input is empty, so that no command can eat the next one. Functions, aliases and traps that a
command leaves behind are not called to run the next command or to print its mark. A command that runs out of time is
interrupted like by Ctrl-C, and the rest of its line with it; should the shell not answer then, or have ended, a new one
takes its place and the result says so (``session_restarted``).

The shell is interactive, without a terminal: that is what makes it survive an interrupt and abandon the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentkit.errors import CommandNotFound, ExecFailed, ExecTimeout, SandboxError, SandboxLost
from agentkit.sandboxes import calls
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.capture import Capture
from agentkit.sandboxes.living import Living
from agentkit.sandboxes.types import ExecResult, Stream

START_TIMEOUT = 20.0
RESYNC_TIMEOUT = 1.0
"""Seconds in which an interrupted shell must answer before it is killed."""
_ASK_AGAIN = 0.25
_LIFE = 7 * 86400.0
_SIGINT, _SIGKILL = 2, 9

_BEST_SHELL = (
    "command -v bash >/dev/null 2>&1 && exec bash --norc --noprofile --noediting -i; exec sh -i"  # bash if there is one
)
_QUIET = "set +o history; set +H"
"""For bash: an exclamation mark means nothing."""


@dataclass(frozen=True)
class ShellResult(ExecResult):
    """How a command of a shell ended."""

    session_restarted: bool = False
    """The shell ended, or had to be killed: the next command meets a new one, without what the old one knew."""


class _Output:
    """One stream of the shell, cut into what belongs to each command."""

    def __init__(self) -> None:
        self._capture = Capture(0)
        self._pending = b""
        self._mark = re.compile(b"(?!)")
        self._last = ""
        self._longest = 0
        self.status: int | None = None
        self.complete = asyncio.Event()

    def expect(self, limit: int, nonce: str) -> None:
        """From here on output belongs to a command that ends with the mark of ``nonce``."""
        self._capture = Capture(limit)
        # A shell that was asked several times whether it answers may still say so: the mark before this one is dropped
        # too. None of an older one can come, for a shell reads and answers in order.
        self._mark = _any_of(self._last, nonce)
        self._last = nonce
        self._longest = len(nonce) + 16
        self.status = None
        self.complete.clear()
        self.feed(b"")

    def expect_also(self, nonce: str) -> None:
        """The command was interrupted: its own mark may come or not, this one ends it."""
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
        # What may be the beginning of a mark waits; the rest need not.
        keep = 0 if self.complete.is_set() else self._longest
        if not self.complete.is_set() and len(self._pending) > keep:
            cut = len(self._pending) - keep
            self._capture.feed(self._pending[:cut])
            self._pending = self._pending[cut:]
        elif self.complete.is_set():
            # Written in the background between two commands; bounded, and shown with the next one.
            self._pending = self._pending[-65536:]

    def take(self) -> tuple[bytes, bool]:
        """What belonged to the command, and whether something was left out."""
        if not self.complete.is_set():
            self._capture.feed(self._pending)
            self._pending = b""
        return self._capture.value(), self._capture.truncated


class Shell:
    """Made by ``Sandbox.shell``. Commands run one after the other."""

    def __init__(self, sandbox: Living, *, cwd: str | None, env: Mapping[str, str] | None) -> None:
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
        """Start the shell; done by ``Sandbox.shell``. Raises ``SandboxLost`` if it does not answer."""
        self._outputs = {"stdout": _Output(), "stderr": _Output()}
        self._ended = asyncio.Event()
        request = calls.request(
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
                f"no shell answers in sandbox {self._sandbox.id}; does its image have /bin/sh?", reason="agent_dead"
            )

    async def run(
        self, cmd: str, *, timeout: float | None = None, output_limit: int | None = None, check: bool = False
    ) -> ShellResult:
        """Run a command in the shell; its standard input is empty. ``timeout`` in seconds.

        Raises like ``Sandbox.exec``. A shell of an earlier generation of its sandbox raises ``SandboxLost``.
        """
        if "\0" in cmd:
            raise CommandNotFound("a command cannot hold a NUL", argv=(cmd,))
        limit = self._sandbox.spec.output_limit if output_limit is None else output_limit
        seconds = self._sandbox.spec.exec_timeout if timeout is None else timeout
        if not 0 < seconds <= _LIFE:
            raise ValueError(f"timeout={timeout!r} must be a positive number of seconds, at most {_LIFE:g}")
        async with self._turn:
            self._check()
            result = await self._sandbox.working(self._run(cmd, seconds, limit), "shell")
        self._sandbox.note_result(result)
        if check and result.timed_out:
            raise ExecTimeout(f"{cmd[:200]!r} ran longer than {seconds:g} s", result=result)
        if check and not result.ok:
            raise ExecFailed(f"{cmd[:200]!r} ended with {result.exit_code}: {result.stderr[-1000:]}", result=result)
        return result

    async def close(self) -> None:
        """End the shell and what runs in it; twice is fine."""
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
            # A shell that reads no more has ended, or is about to run out of time.
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
        """A line and the marks that tell its end. The prompt is kept empty, whatever the line did to it."""
        assert self._process is not None
        nonce = secrets.token_hex(16)
        for output in self._outputs.values():
            output.expect(limit, nonce)
        await self._process.write(f"{line}; {_marks(nonce)}; PS1= PS2= PROMPT_COMMAND=\n".encode())

    async def _interrupt(self) -> None:
        """Ctrl-C, and ask until the shell answers or the time for it is over."""
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
        """After a cancellation: the command must not go on, the shell should."""
        with contextlib.suppress(SandboxError):
            if not self._complete and not self._ended.is_set():
                await self._interrupt()
            if not self._complete:
                await self._replace()

    async def _replace(self) -> ExecResult | None:
        """Kill what is left of the shell and start another; returns how it ended, if that can be known."""
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
                reader.cancel()
                await asyncio.wait({reader})
        return None

    @property
    def _complete(self) -> bool:
        return all(output.complete.is_set() for output in self._outputs.values())

    async def _until_complete(self, timeout: float) -> None:
        """Until both streams are complete, the shell has ended, or the time is over."""

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
            pass  # whoever runs a command learns it from there
        finally:
            ended.set()

    def _check(self) -> None:
        if self._closed:
            raise SandboxLost("this shell is closed; ask its sandbox for another", reason="removed")
        if self._generation != self._sandbox.generation:
            raise SandboxLost("this shell was lost when its sandbox started anew", reason="replaced")
        if self._process is None:
            raise SandboxLost("this shell could not be started again; ask its sandbox for another", reason="exited")


# In bash, assigning POSIXLY_CORRECT begins the POSIX mode, where no function comes before a special builtin (eval,
# trap, unset), as everywhere in other shells. An assignment is no command, so nothing can be put in its place, and a
# backslash keeps aliases away. What cannot be undone (a read-only variable) ends in a shell that does not answer.
_PLAIN = "POSIXLY_CORRECT=1"
_OWN = r"\unset POSIXLY_CORRECT"


def _command(cmd: str) -> str:
    """A line that runs ``cmd`` with an empty standard input, independent of what earlier commands redefined."""
    return rf"{_PLAIN}; \eval {shlex.quote(f'{_OWN}{chr(10)}{cmd}')} </dev/null"


def _marks(nonce: str) -> str:
    """Print the status of what came before on standard output, and the end of both streams."""
    return (
        rf"_agentkit=$? {_PLAIN}; \trap - DEBUG 2>/dev/null; \unset -f printf; "
        rf"""\printf '\036%s:%d\036' {nonce} "$_agentkit"; \printf '\036%s\036' {nonce} >&2; {_OWN}"""
    )


def _any_of(*nonces: str) -> re.Pattern[bytes]:
    """The end mark of any of these."""
    return re.compile(b"\x1e(?:%s)(?::[0-9]{1,3})?\x1e" % "|".join(filter(None, nonces)).encode())
