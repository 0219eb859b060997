"""One sandbox, as its owner uses it: commands, files, shells, states.

Invariant: see ``living``; here nothing is kept that could contradict it.

    async with await Sandbox.create() as box:
        result = await box.exec("echo hi")
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentkit.errors import ExecFailed, ExecTimeout, SandboxError
from agentkit.sandboxes import backends, calls
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend, Channel, Process
from agentkit.sandboxes.claims import Claim
from agentkit.sandboxes.files import Files
from agentkit.sandboxes.living import ANSWER_GRACE, CALL_TIMEOUT, Living, end_of, shown
from agentkit.sandboxes.shell import Shell
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import ExecResult, Observed, SandboxInfo, Snapshot, Stats

_log = logging.getLogger(__name__)

DEFAULT_BACKEND = "docker"


class Sandbox(Living):
    """An isolated place to run what nobody should trust. Made by ``create`` and ``connect``."""

    def __init__(self, id: str, spec: SandboxSpec, backend: Backend, release: backends.Release) -> None:
        super().__init__(id, spec, backend, release)
        self.files = Files(self)

    # Making and finding.

    @classmethod
    async def create(
        cls,
        spec: SandboxSpec | str | None = None,
        *,
        backend: str | Backend = DEFAULT_BACKEND,
        snapshot: Snapshot | None = None,
        **fields: Any,
    ) -> Sandbox:
        """Make a sandbox and return when it is ready.

        ``spec`` may be an image's name; ``fields`` are fields of ``SandboxSpec`` that replace those of ``spec``. With
        ``snapshot`` it begins with the files of that moment. A ``backend`` that is an instance must be started.

        Raises ``pydantic.ValidationError``, ``UnsupportedFeature``, ``ImageError``, ``StartTimeout``,
        ``EngineUnavailable``, and ``SandboxLost`` if it died while it started. Nothing is left of a sandbox that did
        not become ready; what the engine refuses to remove, the reaper removes.
        """
        resolved = _resolve(spec, fields)
        if snapshot is not None:
            resolved = resolved.model_copy(update={"image": snapshot.image})
        engine, release = await backends.borrow(backend)
        box = cls(calls.new_id(), resolved, engine, release)
        box._origin = snapshot
        try:
            await box._begin()
        except BaseException as error:
            await finished(box._give_up(error))
            raise
        return box

    @classmethod
    async def connect(cls, id: str, *, backend: str | Backend = DEFAULT_BACKEND) -> Sandbox:
        """A sandbox that exists, whoever made it. ``close`` then ends the connection; ``close(remove=True)`` more.

        Raises ``SandboxLost`` if there is no such sandbox, ``EngineUnavailable``.
        """
        engine, release = await backends.borrow(backend)
        try:
            spec, channel = await engine.attach(id)
        except BaseException:
            await finished(release())
            raise
        box = cls(id, spec, engine, release)
        box._owned = False
        for state in ("creating", "starting"):
            box._lifecycle.to(state, "connected to")
        box._adopt(channel)
        box._lifecycle.to("ready", "connected to")
        return box

    @classmethod
    async def list(
        cls, *, labels: Mapping[str, str] | None = None, backend: str | Backend = DEFAULT_BACKEND
    ) -> list[Observed]:
        """The sandboxes that exist on a back end, with these labels of their specification, whoever made them."""
        engine, release = await backends.borrow(backend)
        try:
            return await engine.list({"agentkit.managed": "1", **Claim.user_labels(labels or {})})
        finally:
            await finished(release())

    @classmethod
    async def discard(cls, snapshot: Snapshot, *, backend: str | Backend | None = None) -> None:
        """Remove what a snapshot holds; nothing there is fine."""
        engine, release = await backends.borrow(backend or snapshot.backend)
        try:
            await engine.discard(snapshot)
        finally:
            await finished(release())

    # Working.

    async def exec(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output_limit: int | None = None,
        check: bool = False,
        idempotency_key: str | None = None,
    ) -> ExecResult:
        """Run a command to its end: a text by ``/bin/sh``, a list as it is.

        It runs at most once; with an ``idempotency_key``, a second call of that key gets the first one's result.
        ``timeout`` in seconds (default: the specification's ``exec_timeout``) ends the whole process tree and returns
        ``timed_out=True`` with the output so far. ``cwd`` is seen from the working directory. ``output_limit`` in bytes
        a stream. Processes left in the background live on and delay nothing.

        Raises ``CommandNotFound``, ``SandboxLost``, ``LeaseExpired``, ``InvalidTransition`` (paused), and with
        ``check`` also ``ExecTimeout`` and ``ExecFailed``, which hold the result.
        """
        request = calls.request(
            self.spec,
            cmd,
            timeout=timeout,
            cwd=cwd,
            env=env,
            stdin=stdin,
            output_limit=output_limit,
            idempotency_key=idempotency_key,
        )
        with self._work("exec") as channel:
            result = await self._answered(channel, channel.exec(request), request.timeout)
        self.note_result(result)
        if check and result.timed_out:
            raise ExecTimeout(f"{shown(request)} ran longer than {request.timeout:g} s", result=result)
        if check and not result.ok:
            raise ExecFailed(f"{shown(request)} ended with {result.exit_code}: {end_of(result)}", result=result)
        return result

    async def spawn(
        self,
        cmd: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        output_limit: int | None = None,
    ) -> Process:
        """Start a command and return at once. ``stdin`` is what it reads first; more may follow by ``write``.

        ``timeout`` bounds its life; ``output_limit`` the bytes that wait for a reader. Raises like ``exec``.
        """
        request = calls.request(
            self.spec, cmd, timeout=timeout, cwd=cwd, env=env, stdin=stdin, output_limit=output_limit
        )
        return await self.call(lambda channel: channel.spawn(request), "spawn")

    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """A shell that keeps its working directory, variables and functions from command to command."""
        shell = Shell(self, cwd=cwd, env=env)
        await shell.start()
        return shell

    # States.

    async def pause(self) -> None:
        """Freeze all processes. Raises ``InvalidTransition`` while commands run."""
        async with self._changing:
            self._usable()
            if not self._lifecycle.can("paused"):
                raise self._impossible("pause")
            self._lifecycle.to("paused", "pause")
            try:
                await self._engine(self.backend.pause(self.id), "pause")
            except BaseException as error:
                # It may be frozen or not: thaw what can be, so that the state told is the true one.
                await finished(self._undo_pause(error))
                raise

    async def resume(self) -> None:
        """Let a paused sandbox go on. Raises ``InvalidTransition`` if it is not paused."""
        async with self._changing:
            self._check_there()
            if self.state != "paused":
                raise self._impossible("resume")
            await self._engine(self.backend.resume(self.id), "resume")
            if self.state == "paused":
                self._lifecycle.to("ready", "resume")

    async def snapshot(self, name: str | None = None) -> Snapshot:
        """Keep the files of this moment; processes are not kept. ``discard`` removes it."""
        async with self._changing:
            self._usable()
            await self._claim.watch()
            return await self._engine(self.backend.snapshot(self.id, name or calls.new_id()), "snapshot", CALL_TIMEOUT)

    async def fork(self) -> Sandbox:
        """Another sandbox of the same specification with the same files. Processes are not copied."""
        snapshot = await self.snapshot()
        try:
            child = await type(self).create(self.spec, backend=self.backend, snapshot=snapshot)
        except BaseException:
            with contextlib.suppress(SandboxError):
                await finished(self.backend.discard(snapshot))
            raise
        child._discard_origin = True
        return child

    async def restart(self) -> None:
        """Kill everything in it and start it again: the temporary file systems are empty, and handles of shells and
        processes are lost. Heals a sandbox that is unhealthy or tainted."""
        await self._recover("restart", self.backend.restart, None)

    async def reset(self) -> None:
        """Make it as it was when it was created, files included."""
        start = self.backend.restart if self.spec.readonly_root else self._recreate
        await self._recover("reset", start, self._origin)

    async def extend(self, ttl: float | None) -> None:
        """Let it live for ``ttl`` seconds from now; None for as long as its owner. Raises ``LeaseExpired``."""
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl={ttl!r} must be a positive number of seconds")
        self._check_there()
        await self._claim.extend(ttl)
        self._check_there()
        self._set_expiry(ttl)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            await self.close()
        except SandboxError as problem:
            if error is None:
                raise
            _log.warning("sandbox %s was not removed: %s", self.id, problem)

    # Seeing.

    @property
    def info(self) -> SandboxInfo:
        """What it is and how it is; asks nobody."""
        left = None if self._expires_at is None else self._expires_at - asyncio.get_running_loop().time()
        return SandboxInfo(
            id=self.id,
            backend=self.backend.name,
            state=self.state,
            generation=self.generation,
            isolation=self._channel.isolation if self._channel else "",
            loosened=tuple(self.spec.loosened()),
            labels=dict(self.spec.labels),
            created=self._created,
            expires=None if left is None else time.time() + left,
            tainted=self._tainted,
        )

    async def stats(self) -> Stats:
        """What it uses now."""
        return await self.call(lambda channel: channel.stats(), "stats")

    async def logs(self, tail: int = 100) -> str:
        """The last lines of its main process."""
        return (await self._engine(self.backend.logs(self.id, tail), "logs")).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state} on {self.backend.name}>"

    async def _undo_pause(self, error: BaseException) -> None:
        if self.state != "paused":
            return
        with contextlib.suppress(SandboxError):
            await self._engine(self.backend.resume(self.id), "resume")
        try:
            # Whatever the engine says or does not say: what answers is not frozen.
            assert self._channel is not None
            await self._channel.ping(ANSWER_GRACE)
            self._lifecycle.to("ready", f"pause failed: {error}")
        except (SandboxError, asyncio.TimeoutError):
            self._loss = self._loss or "engine_down"
            self._fall_ill(f"pause failed: {error}")

    async def _recreate(self, id: str) -> Channel:
        """A container whose root could be written to is replaced by a new one of the same name."""
        await self.backend.remove(id)
        channel = await self.backend.create(id, self.spec, self._claim.labels)
        if self.state != "recovering":
            # Closed meanwhile: what was removed then was the old one.
            await finished(self.backend.remove(id))
        return channel


def _resolve(spec: SandboxSpec | str | None, fields: dict[str, Any]) -> SandboxSpec:
    if isinstance(spec, str):
        return SandboxSpec(image=spec, **fields)
    if spec is None:
        return SandboxSpec(**fields)
    # Not model_copy: what is replaced must be validated like everything else.
    return (
        SandboxSpec(**{**{name: getattr(spec, name) for name in spec.model_fields_set}, **fields}) if fields else spec
    )
