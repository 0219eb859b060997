"""The slow way into a sandbox, for images without Python 3.8: each call is a ``docker exec`` of a small shell script.

Invariant: as with the agent, a result comes when the command ends, whoever holds its streams open; its exit code is
real; memory is bounded; whatever was started can be killed, wherever it ran off to. Weaker than the agent: a call costs
some 50 ms and the engine makes about 20 a second; a program that clears its environment and leaves its session escapes
the kill; ``exit 137`` and death by SIGKILL look the same; nothing inside ends the sandbox after ``idle_timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from agentkit.errors import (
    EngineUnavailable,
    InvalidTransition,
    PathError,
    SandboxError,
    SandboxLost,
    UnsupportedFeature,
)
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Channel, Process
from agentkit.sandboxes.backends import docker_scripts as scripts
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.backends.docker_process import ExecProcess
from agentkit.sandboxes.backends.docker_stream import ExecStream, open_stream
from agentkit.sandboxes.lane import bounded
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import ExecRequest, ExecResult, FileInfo, Stats

_EXEC_TIMEOUT = 30.0
"""Seconds that the engine has to start an exec."""
_FILES = 60.0
_ARCHIVE = 600.0
_LISTING = 64 << 20
_KEPT_KEYS = 256
_OURS = {"LC_ALL": "C"}
"""The environment of our own scripts: the sandbox's could lead them astray."""


class Death(Protocol):
    """How to find out why a container is gone: the error to raise, or None if it still runs."""

    async def __call__(self, id: str) -> SandboxLost | None: ...


class DockerExecChannel(Channel):
    """The hot path to one start of a sandbox without an agent. ``death`` tells why it is gone."""

    def __init__(self, engine: Engine, id: str, spec: SandboxSpec, isolation: str, death: Death) -> None:
        self._engine, self._id, self._spec, self._death = engine, id, spec, death
        self.isolation = isolation
        self.lost = asyncio.get_running_loop().create_future()
        self._results: OrderedDict[str, asyncio.Task[ExecResult]] = OrderedDict()
        self._processes: weakref.WeakSet[ExecProcess] = weakref.WeakSet()
        self._oom_kills = 0
        self._watcher = asyncio.ensure_future(self._watch())

    # Commands

    async def exec(self, request: ExecRequest) -> ExecResult:
        key = request.idempotency_key
        if key is None:
            return await self._exec(request, self._spec.env)
        # Whoever comes first runs it; it goes on when that one is cancelled, for others may wait for it too.
        if key not in self._results:
            self._results[key] = asyncio.ensure_future(self._exec(request, self._spec.env))
            while len(self._results) > _KEPT_KEYS:
                self._results.popitem(last=False)
        return await asyncio.shield(self._results[key])

    async def _exec(self, request: ExecRequest, env: Mapping[str, str]) -> ExecResult:
        process = await self._start(request, env)
        feeding = asyncio.ensure_future(process.feed(request.stdin))
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await finished(process.kill_tree())
            raise
        finally:
            feeding.cancel()
            process.drop()

    async def spawn(self, request: ExecRequest) -> Process:
        if request.idempotency_key:
            raise UnsupportedFeature("spawn takes no idempotency key: its output goes to one reader, once")
        return await self._spawn(request, self._spec.env)

    async def _spawn(self, request: ExecRequest, env: Mapping[str, str]) -> Process:
        process = await self._start(request, env)
        try:
            if request.stdin:
                await process.write(request.stdin)
        except BrokenPipeError:
            pass
        except BaseException:
            await finished(process.kill_tree())
            process.drop()
            raise
        return process

    async def _start(self, request: ExecRequest, env: Mapping[str, str]) -> ExecProcess:
        nonce = secrets.token_hex(16)
        argv = ["/bin/sh", "-c", scripts.RUN, "sh", nonce, request.cwd, *request.argv]
        variables = {**env, **request.env, scripts.MARK: nonce}
        began = time.monotonic()
        try:
            exec_id, stream = await self._attach(argv, [f"{name}={value}" for name, value in variables.items()])
        except asyncio.CancelledError:
            # It may run by now, with nobody who knows of it.
            await finished(self.kill(nonce))
            raise
        process = ExecProcess(self, stream, exec_id, nonce, request, began)
        self._processes.add(process)
        return process

    async def kill(self, nonce: str, signal: str = "KILL") -> bool:
        """As in ``Home``."""
        argv = ["/bin/sh", "-c", scripts.KILL, "sh", f"{scripts.MARK}={nonce}", signal]
        with contextlib.suppress(SandboxLost):
            try:
                return (await bounded(self._script_raw(argv), _EXEC_TIMEOUT)) == 0
            except (SandboxError, asyncio.TimeoutError):
                return False
        return True

    async def exit_code(self, exec_id: str) -> int | None:
        """The exit code by the engine's account; None while it runs. Raises ``SandboxLost``."""
        state = await self._call("inspect an exec", lambda client: client.exec_inspect(exec_id))
        return None if state["Running"] else state["ExitCode"]

    def note_oom_kills(self, count: int | None) -> bool:
        """As in ``Home``."""
        grew = count is not None and count > self._oom_kills
        self._oom_kills = max(self._oom_kills, count or 0)
        return grew

    async def gone(self) -> SandboxLost | None:
        """As in ``Home``."""
        if self.lost.done():
            return SandboxLost(f"sandbox {self._id} is lost: {self.lost.result()}", reason=self.lost.result())
        return await self._death(self._id)

    async def _script_raw(self, argv: Sequence[str]) -> int | None:
        """Run a script of ours outside of any command and return its exit code."""
        exec_id, stream = await self._attach(argv, [])
        try:
            stream.write_eof()
            while await stream.read() is not None:
                pass
        finally:
            stream.close()
        return await self.exit_code(exec_id)

    async def _attach(self, argv: Sequence[str], env: Sequence[str]) -> tuple[str, ExecStream]:
        def create(client: Any) -> str:
            return client.exec_create(
                self._id, list(argv), stdout=True, stderr=True, stdin=True, environment=list(env), workdir="/"
            )["Id"]

        exec_id = await self._call("prepare an exec", create)
        try:
            stream = await open_stream(self._engine.socket, self._engine.api, exec_id, _EXEC_TIMEOUT)
        except EngineUnavailable:
            raise
        except SandboxError as error:
            if (death := await self.gone()) is not None:
                raise death from error
            raise
        return exec_id, stream

    async def _call(self, what: str, job: Any) -> Any:
        if self.lost.done() and (lost := await self.gone()) is not None:
            raise lost
        try:
            return await self._engine.call(what, job, timeout=_EXEC_TIMEOUT, lane="exec")
        except Refused as error:
            if error.status == 409 and "paused" in str(error):
                raise InvalidTransition(f"sandbox {self._id} is paused: resume it first") from error
            if error.status in (404, 409) and (death := await self.gone()) is not None:
                raise death from error
            raise

    # Files

    async def read(self, path: str, limit: int) -> bytes:
        result = await self._script("read", path, scripts.READ, _plain(path), str(limit), keep=2 * limit + 2)
        if len(result.stdout_bytes) > limit:
            raise scripts.file_error("read", path, scripts.LARGE, "")
        return result.stdout_bytes

    async def write(self, path: str, data: bytes, mode: int) -> None:
        parent = _plain(path).rstrip("/").rpartition("/")[0] or "/"
        hidden = f"{parent.rstrip('/')}/.agentkit-{secrets.token_hex(8)}"
        arguments = (path, parent, hidden, f"{mode & 0o7777:o}", str(len(data)))
        await self._script("write", path, scripts.WRITE, *arguments, stdin=data)

    async def list(self, path: str) -> list[FileInfo]:
        result = await self._script("list", path, scripts.LIST, _plain(path), keep=_LISTING)
        if result.truncated:
            raise PathError(f"cannot list {path!r}: it has too many entries", path=path)
        return scripts.parse_list(path, result.stdout_bytes)

    async def stat(self, path: str) -> FileInfo | None:
        result = await self._script("look at", path, scripts.STAT, _plain(path), none=True)
        return None if result is None else scripts.parse_stat(path, result.stdout)

    async def remove(self, path: str) -> None:
        await self._script("remove", path, scripts.REMOVE, _plain(path), timeout=_ARCHIVE)

    async def mkdir(self, path: str) -> None:
        await self._script("make directory", path, scripts.MKDIR, _plain(path))

    async def pack(self, paths: Sequence[str], timeout: float = _ARCHIVE) -> AsyncIterator[bytes]:
        """A tar archive of directories, made by the image's ``tar``, piece by piece. Never unpack it on the host."""
        names = [_plain(path).lstrip("/") for path in paths]
        process = await self._spawn(self._request(["tar", "-C", "/", "-cf", "-", *names], timeout, 1 << 20), _OURS)
        try:
            await process.close_stdin()
            complaints = bytearray()
            async for stream, data in process:
                if stream == "stdout":
                    yield data
                else:
                    complaints += data[: 1000 - len(complaints)]
            result = await process.wait()
            if result.exit_code not in (0, 1):  # 1: a file changed meanwhile
                raise scripts.file_error(
                    "pack", ", ".join(paths), result.exit_code, complaints.decode("utf-8", "replace")
                )
        finally:
            await finished(process.kill())

    async def unpack(self, paths: Sequence[str], archive: AsyncIterable[bytes], timeout: float = _ARCHIVE) -> None:
        """Put an archive that ``pack`` made of ``paths`` in place of what these directories hold now."""
        where = ", ".join(paths)
        await self._script("empty", where, scripts.EMPTY, *(_plain(path) for path in paths), timeout=timeout)
        process = await self._spawn(self._request(["tar", "-C", "/", "-xf", "-"], timeout, 1 << 16), _OURS)
        try:
            with contextlib.suppress(BrokenPipeError):
                async for data in archive:
                    await process.write(data)
            await process.close_stdin()
            result = await process.wait()
            if not result.ok:
                raise scripts.file_error("unpack into", where, result.exit_code, result.stderr)
        finally:
            await finished(process.kill())

    async def _script(
        self,
        operation: str,
        path: str,
        script: str,
        *arguments: str,
        stdin: bytes = b"",
        keep: int = 1 << 16,
        timeout: float = _FILES,
        none: bool = False,
    ) -> Any:
        """The result of a script that did its work; None if ``none`` and there is nothing at ``path``."""
        request = self._request(["/bin/sh", "-c", script, "sh", *arguments], timeout, keep, stdin)
        result = await self._exec(request, _OURS)
        if result.ok:
            return result
        if none and result.exit_code == scripts.MISSING:
            return None
        if result.timed_out:
            raise SandboxError(
                f"the sandbox could not {operation} {path!r} in {timeout:g} s: is it starved?", path=path
            )
        raise scripts.file_error(operation, path, result.exit_code, result.stderr)

    def _request(self, argv: Sequence[str], timeout: float, keep: int, stdin: bytes = b"") -> ExecRequest:
        return ExecRequest(tuple(argv), timeout, keep, cwd="/", stdin=stdin)

    # The sandbox itself

    async def stats(self) -> Stats:
        argv = ["/bin/sh", "-c", scripts.STATS, "sh", self._spec.workdir]
        result = await self._exec(self._request(argv, _FILES, 1 << 16), _OURS)
        return scripts.parse_stats(result.stdout)

    async def ping(self, timeout: float) -> float:
        began = time.monotonic()
        # A sandbox that is dying still lets itself be asked, and answers with a code of the engine's.
        if (code := await bounded(self._script_raw(["/bin/sh", "-c", ":"]), timeout)) != 0:
            raise await self.gone() or SandboxError(f"sandbox {self._id} cannot run a command: exit code {code}")
        return time.monotonic() - began

    def lose(self, reason: str) -> None:
        """Say that the sandbox is gone: ``reason`` as in ``SandboxLost``."""
        if not self.lost.done():
            self.lost.set_result(reason)
        self._watcher.cancel()
        for process in list(self._processes):
            process.drop()

    async def close(self) -> None:
        self.lose("closed")

    async def _watch(self) -> None:
        """Notice the end of the sandbox at once: a program that waits for input for ever ends only with it."""
        pause = 0.1
        while True:
            began = time.monotonic()
            with contextlib.suppress(SandboxError):
                _, stream = await self._attach(["/bin/sh", "-c", "exec cat >/dev/null"], [])
                try:
                    while await stream.read() is not None:
                        pass
                finally:
                    stream.close()
            with contextlib.suppress(EngineUnavailable):
                if (death := await self.gone()) is not None:
                    self.lose(death.details["reason"])
                    return
            # The workload may have killed the program, or the engine is busy.
            pause = 0.1 if time.monotonic() - began > 10.0 else min(2 * pause, 5.0)
            await asyncio.sleep(pause)


def _plain(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise PathError(f"{path!r} is not an absolute path", path=path)
    return path
