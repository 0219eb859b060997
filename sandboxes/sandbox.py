"""One sandbox: creation, commands, states, removal.

    async with Sandbox.create() as box:
        result = await box.exec("echo hi")

Invariant: every call ends, with a result or a typed error, even if the engine or the sandbox hangs. What was created
is removed exactly once: by ``close``, at the end of its time to live, or at once if it never became ready or its
creation was cancelled. A sandbox that is lost, expired or tainted (a process survived its kill) refuses commands. Time
is the event loop's, which never jumps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from agentkit.errors import (
    EngineUnavailable,
    InvalidTransition,
    SandboxError,
    SandboxExpired,
    SandboxLost,
    StartTimeout,
)
from agentkit.sandboxes import backends, commands
from agentkit.sandboxes.arguments import check_type
from agentkit.sandboxes.backend import Backend, Channel, Process
from agentkit.sandboxes.diagnosis import diagnose
from agentkit.sandboxes.expiry import Expiry
from agentkit.sandboxes.files import Files
from agentkit.sandboxes.lifecycle import WORKING, Lifecycle
from agentkit.sandboxes.liveness import MISSES, PERIOD, probe_channel
from agentkit.sandboxes.paths import new_id
from agentkit.sandboxes.reaper.labels import MANAGED, ORIGIN, user_labels
from agentkit.sandboxes.reaper.registration import Registration
from agentkit.sandboxes.shell import Shell
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished, opening, stopped
from agentkit.sandboxes.types import ExecRequest, ExecResult, Observed, SandboxInfo, Snapshot, State, Stats, Transition
from agentkit.sandboxes.watchdog import Watchdog

T = TypeVar("T")

_log = logging.getLogger(__name__)

DEFAULT_BACKEND = "docker"

ANSWER_GRACE = 10.0
"""Seconds beyond its own timeout for a command whose agent answers probes: killing the command takes up to 2 s."""
OVERDUE_PERIOD, OVERDUE_MISSES = 0.95, 2
"""After a command's timeout, silence for so many periods shows that the agent is hung."""
CALL_TIMEOUT = 60.0
"""Seconds after which a call other than a command shows the same."""
ENGINE_TIMEOUT = 30.0
"""Seconds that removing, pausing and similar requests may take."""
_READY_POLL = 0.05


class Sandbox:
    """An isolated environment for untrusted programs. Use ``create`` or ``connect``; the constructor is internal.

    Example:
        ```python
        async with Sandbox.create(resources=Resources(cpus=2), ttl=600) as box:
            await box.files.write("hello.py", "print('hi')")
            result = await box.exec("python3 hello.py")
        ```

    Attributes:
        id: unique name: ``ak-`` and 16 hexadecimal digits.
        spec: the specification, immutable.
        backend: the back end that runs the sandbox.
        files: files of the sandbox.
    """

    def __init__(self, id: str, spec: SandboxSpec, backend: Backend, release: backends.Release) -> None:
        self.id = id
        self.spec = spec
        self.backend = backend
        self.files = Files(self)  # pyright: ignore[reportArgumentType]  # one class seen under two paths
        self._release_backend = release
        self._now = asyncio.get_running_loop().time
        self._lifecycle = Lifecycle(id, monotonic=self._now)
        self._registration = Registration(id, spec, backend)
        self._expiry = Expiry(id, lambda: self.close(remove=True))
        self._watchdog = Watchdog(self._probe_agent)
        self._owned = True
        self._channel: Channel | None = None
        self._loss: str | None = None
        self._tainted = False
        self._diagnosis: asyncio.Task[dict[str, Any]] | None = None
        self._in_flight = 0
        self._changing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._freezes = False  # a snapshot is being taken
        self._frozen_until = -math.inf
        self._origin: Snapshot | None = None
        self._discard_origin = False
        self._created = time.time()

    # Creating and finding

    @classmethod
    @opening
    async def create(
        cls,
        spec: SandboxSpec | str | None = None,
        *,
        backend: str | Backend = DEFAULT_BACKEND,
        snapshot: Snapshot | None = None,
        **fields: Any,
    ) -> Sandbox:
        """Create a sandbox and wait until it is ready: ``async with Sandbox.create() as box`` or ``await``.

        A sandbox that does not become ready is removed; if the engine refuses, the reaper removes it later.

        Args:
            spec: a specification, or the name of an image.
            backend: name of a back end, or an instance that was started.
            snapshot: start with the files of this snapshot, and its image.
            **fields: fields of ``SandboxSpec`` that replace those of ``spec``.

        Returns:
            The sandbox, once awaited. ``async with`` removes it at the end.

        Raises:
            pydantic.ValidationError: a field is not valid.
            TypeError: ``spec`` is neither a specification nor the name of an image.
            ConfigError: ``backend`` or ``snapshot`` is of a wrong type, or there is no such back end.
            UnsupportedFeature: the back end cannot provide what ``spec`` requires.
            ImageError: the image does not exist or cannot be pulled.
            StartTimeout: the sandbox did not become ready in time.
            EngineUnavailable: the engine does not answer.
            SandboxLost: the sandbox died during its start.
        """
        check_type("snapshot", snapshot, Snapshot, "a Snapshot, as returned by Sandbox.snapshot")
        resolved = SandboxSpec.of(spec, **fields)
        if snapshot is not None:
            resolved = resolved.model_copy(update={"image": snapshot.image})
        engine, release = await backends.borrow(backend)
        box = cls(new_id(), resolved, engine, release)
        box._origin = snapshot
        try:
            await box._start()
        except BaseException as error:
            await finished(box._abort_start(error))
            raise
        return box

    @classmethod
    @opening
    async def connect(cls, id: str, *, backend: str | Backend = DEFAULT_BACKEND) -> Sandbox:
        """Connect to an existing sandbox, of any owner: ``async with Sandbox.connect(id) as box`` or ``await``.

        ``close`` ends the connection only; ``close(remove=True)`` removes the sandbox.

        Raises:
            SandboxLost: the sandbox does not exist.
            EngineUnavailable: the engine does not answer.
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
        """Return the sandboxes of a back end, of all owners, whose specifications have these ``labels``.

        Raises:
            EngineUnavailable: the engine does not answer.
        """
        engine, release = await backends.borrow(backend)
        try:
            return await engine.list({MANAGED: "1", **user_labels(labels or {})})
        finally:
            await finished(release())

    @classmethod
    async def discard(cls, snapshot: Snapshot, *, backend: str | Backend | None = None) -> None:
        """Remove a snapshot. Does nothing if it does not exist.

        Raises:
            EngineUnavailable: the engine does not answer.
        """
        engine, release = await backends.borrow(backend or snapshot.backend)
        try:
            await engine.discard(snapshot)
        finally:
            await finished(release())

    # Commands

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
        """Run a command and wait until it ends. It runs at most once.

        Processes that the command leaves in the background keep running and do not delay the result.

        Args:
            cmd: a string is run by ``/bin/sh -c``, a sequence directly.
            timeout: seconds until the whole process tree is killed; the result then has ``timed_out=True`` and the
                output so far. Default: ``spec.exec_timeout``.
            cwd: working directory, relative to ``spec.workdir``.
            env: variables added to the sandbox's environment.
            stdin: standard input.
            output_limit: bytes kept of each stream. Default: ``spec.output_limit``.
            check: raise an error if the command fails or times out.
            idempotency_key: a second call with this key returns the result of the first one.

        Raises:
            CommandNotFound: the command could not be started.
            SandboxLost: the sandbox ended or does not answer.
            SandboxExpired: its time to live has ended.
            InvalidTransition: it is paused.
            ExecTimeout: with ``check``: the command timed out. Holds the result.
            ExecFailed: with ``check``: the command failed. Holds the result.
        """
        request = commands.request(
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
        if check:
            commands.check(result, commands.shown(request), request.timeout)
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
        """Start a command and return at once. Arguments and errors as for ``exec``, except:

        Args:
            timeout: seconds that the command may run.
            stdin: what the command reads first; ``Process.write`` adds to it.
            output_limit: bytes of output that wait for a reader before the command is held back.
        """
        request = commands.request(
            self.spec, cmd, timeout=timeout, cwd=cwd, env=env, stdin=stdin, output_limit=output_limit
        )
        return await self.call(lambda channel: channel.spawn(request), "spawn")

    @opening
    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """Start a shell that keeps its working directory, variables and functions between commands.

        Use ``async with box.shell() as shell`` or ``await``. Arguments and errors as for ``exec``.
        """
        shell = Shell(self, cwd=cwd, env=env)  # pyright: ignore[reportArgumentType]  # as above
        await shell.start()
        return shell

    async def ping(self, timeout: float = 2.0) -> float:
        """Return the seconds of a round trip to the agent. Raises ``asyncio.TimeoutError``, ``SandboxLost``."""
        return await self._usable().ping(timeout)

    # States

    async def pause(self) -> None:
        """Freeze all processes.

        Raises:
            InvalidTransition: a command is running.
        """
        async with self._changing:
            self._usable()
            if not self._lifecycle.can("paused"):
                raise self._invalid_state("pause")
            self._lifecycle.to("paused", "pause")
            try:
                await self._engine(self.backend.pause(self.id), "pause")
            except BaseException as error:
                # It may be frozen or not: resume it, so that its state is known.
                await finished(self._undo_pause(error))
                raise

    async def resume(self) -> None:
        """Continue a paused sandbox.

        Raises:
            InvalidTransition: the sandbox is not paused.
        """
        async with self._changing:
            self._check_exists()
            if self.state != "paused":
                raise self._invalid_state("resume")
            await self._engine(self.backend.resume(self.id), "resume")
            if self.state == "paused":
                self._lifecycle.to("ready", "resume")

    async def snapshot(self, name: str | None = None) -> Snapshot:
        """Save the files as they are now; processes are not saved. ``discard`` removes the snapshot.

        Raises:
            FileTooLarge: sparse files make the snapshot larger than what the sandbox can hold.
        """
        async with self._changing:
            self._usable()
            await self._registration.watch_backend()
            self._freezes = True
            try:
                return await self._engine(self.backend.snapshot(self.id, name or new_id()), "snapshot", CALL_TIMEOUT)
            finally:
                self._freezes, self._frozen_until = False, self._now()

    @opening
    async def fork(self) -> Sandbox:
        """Create another sandbox with the same specification and files; processes are not copied.

        Use ``async with box.fork() as child`` or ``await``.
        """
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
        """Kill all processes and start again with empty temporary file systems; shells and processes are lost.

        Makes an unhealthy or tainted sandbox usable again.
        """
        await self._start_again("restart", self.backend.restart, None)

    async def reset(self) -> None:
        """Restore the state just after creation, files included."""
        start = self.backend.restart if self.spec.readonly_root else self._recreate
        await self._start_again("reset", start, self._origin)

    async def extend(self, ttl: float | None) -> None:
        """Set the time to live to ``ttl`` seconds from now; None: as long as its owner.

        Raises:
            SandboxExpired: the time to live has ended already.
        """
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl={ttl!r} must be a positive number of seconds")
        self._check_exists()
        await self._registration.extend(ttl)
        self._check_exists()
        self._expiry.set(ttl)

    async def close(self, *, remove: bool | None = None) -> None:
        """Remove the sandbox and all that belongs to it. A second call does nothing. Takes at most 40 s.

        Args:
            remove: False ends the connection only. Default: False after ``connect``, True otherwise.

        Raises:
            EngineUnavailable: the sandbox could not be removed; another call tries again.
        """
        if self._closing is None or (self._closing.done() and self.state != "removed"):
            self._closing = asyncio.ensure_future(self._close(self._owned if remove is None else remove))
        await finished(self._closing)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            await self.close()
        except SandboxError as problem:
            if error is None:
                raise
            _log.warning("sandbox %s was not removed: %s", self.id, problem)

    # Inspection

    @property
    def state(self) -> State:
        """The current state; ``lifecycle.TRANSITIONS`` lists which may follow."""
        return self._lifecycle.state

    @property
    def generation(self) -> int:
        """Number of starts; shells and processes of an earlier generation are lost."""
        return self._lifecycle.generation

    @property
    def history(self) -> Sequence[Transition]:
        """The last state transitions and their causes, oldest first."""
        return self._lifecycle.history

    @property
    def loss(self) -> str | None:
        """Why the sandbox accepts no commands (``exited``, ``oom``, ``agent_dead``, ``tainted``, …), or None."""
        return "tainted" if self._tainted else self._loss

    @property
    def info(self) -> SandboxInfo:
        """A summary, without a request to the engine or the agent."""
        return SandboxInfo(
            id=self.id,
            backend=self.backend.name,
            state=self.state,
            generation=self.generation,
            isolation=self._channel.isolation if self._channel else "",
            loosened=self.spec.loosened(),
            labels=dict(self.spec.labels),
            created=self._created,
            expires=None if self._expiry.at is None else time.time() + self._expiry.at - self._now(),
            tainted=self._tainted,
        )

    async def stats(self) -> Stats:
        """Return the current use of memory, processor, processes and disk. Raises like ``exec``."""
        return await self.call(lambda channel: channel.stats(), "stats")

    async def logs(self, tail: int = 100) -> str:
        """Return the last ``tail`` lines of the main process. Raises ``EngineUnavailable``."""
        return (await self._engine(self.backend.logs(self.id, tail), "logs")).decode("utf-8", "replace")

    async def events(self) -> AsyncIterator[Transition]:
        """Yield state transitions from now until removal. A reader that is more than 100 behind misses the oldest."""
        queue: asyncio.Queue[Transition] = asyncio.Queue(100)

        def put(transition: Transition) -> None:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(transition)

        stop = self._lifecycle.watch(put)
        try:
            while self.state != "removed" or not queue.empty():
                yield await queue.get()
        finally:
            stop()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state} on {self.backend.name}>"

    # For other modules of the package

    async def call(self, work: Callable[[Channel], Awaitable[T]], cause: str) -> T:
        """Make one call on the channel, bounded in time. Raises like ``exec``."""
        with self._work(cause) as channel:
            return await self._answered(channel, work(channel), CALL_TIMEOUT, 0.0)

    @contextlib.contextmanager
    def busy(self, cause: str) -> Iterator[None]:
        """Mark the sandbox as busy and probe its agent while the body runs. Raises like ``exec``."""
        with self._work(cause), self.watched():
            yield

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Probe the agent while the body waits for something in the sandbox.

        An agent that is silent for ``MISSES`` periods makes the sandbox lost (``hung``): all that waits for it raises
        ``SandboxLost``.
        """
        return self._watchdog.watching()

    async def probe(self, period: float, misses: int) -> float | None:
        """Return the seconds until the agent gave a sign of life; None if it was silent for ``misses`` periods.

        Raises ``SandboxLost``, and ``InvalidTransition`` if the sandbox was paused meanwhile.
        """
        channel, began = self._usable(), self._now()
        latency = await probe_channel(channel, period, misses)
        if latency is None and self.was_paused(began):
            raise self._invalid_state("answer")
        return latency

    async def why_lost(self) -> Mapping[str, Any]:
        """Return what the engine recorded about the end of this sandbox; see ``diagnose``. Takes at most 5 s."""
        if self._diagnosis is None or (self._diagnosis.done() and not self._diagnosis.result()):
            self._diagnosis = asyncio.ensure_future(diagnose(self.backend, self.id))
        return await asyncio.shield(self._diagnosis)

    def mark_lost(self, reason: str) -> None:
        """Declare the sandbox lost: waiting calls fail at once, and it accepts no more commands."""
        channel = self._channel
        if channel is None or channel.lost.done() or self.state in ("unhealthy", "stopping", "removed", "failed"):
            return
        channel.lose(reason)
        self._on_lost(channel)

    def mark_slow(self, slow: bool, cause: str) -> None:
        """Set or leave the state ``degraded``: the sandbox answers far more slowly than its peers, but works."""
        before, after = ("ready", "degraded") if slow else ("degraded", "ready")
        if self.state == before:
            self._lifecycle.to(after, cause)

    def note_result(self, result: ExecResult) -> None:
        """Mark the sandbox unusable if processes of the command survived their kill."""
        if result.tainted and not self._tainted:
            self._tainted = True
            self._mark_unhealthy("tainted: processes survived their kill")

    def was_paused(self, since: float) -> bool:
        """Return whether the owner had the sandbox paused at any time since ``since``, in the event loop's time.

        A snapshot counts: the engine pauses the sandbox while it copies the files.
        """
        if self._freezes or self._frozen_until >= since:
            return True
        return self.state == "paused" or any(
            "paused" in (change.before, change.after) and change.monotonic >= since for change in self.history
        )

    def watch(self, watcher: Callable[[Transition], None]) -> Callable[[], None]:
        """Call ``watcher`` at each state transition; returns a function that stops it. It must not raise or block."""
        return self._lifecycle.watch(watcher)

    # Start and end

    async def _start(self) -> None:
        self.backend.check(self.spec)
        self._lifecycle.to("creating", "create")
        labels = await self._registration.register()
        if self._origin is not None:
            labels = self._registration.labels = {**labels, ORIGIN: self._origin.id}
        channel = await self.backend.create(self.id, self.spec, labels)
        self._lifecycle.to("starting", "created")
        self._adopt(channel)
        await self._restore(self._origin)
        await self._prepare(channel)
        if self.spec.ttl is not None:  # only now: pulling a large image does not use up the time to live
            await self._registration.extend(self.spec.ttl)
        self._expiry.set(self.spec.ttl)
        self._become_ready("ready to work")

    async def _prepare(self, channel: Channel) -> None:
        """Run the ``setup`` and ``ready`` commands of the specification."""
        end = self._now() + self.spec.start_timeout
        if self.spec.setup:
            request = commands.request(self.spec, self.spec.setup, timeout=self.spec.start_timeout)
            result = await self._answered(channel, channel.exec(request), request.timeout)
            if not result.ok:
                raise self._not_ready("setup", request, result)
        while self.spec.ready:
            request = commands.request(self.spec, self.spec.ready, timeout=max(end - self._now(), 0.1))
            result = await self._answered(channel, channel.exec(request), request.timeout)
            if result.ok:
                return
            if self._now() + _READY_POLL >= end:
                raise self._not_ready("ready", request, result)
            await asyncio.sleep(_READY_POLL)

    def _not_ready(self, phase: str, request: ExecRequest, result: ExecResult) -> StartTimeout:
        how = "timed out" if result.timed_out else f"ended with {result.exit_code}"
        tail = commands.output_tail(result)
        return StartTimeout(
            f"sandbox {self.id} is not ready: {phase} command {commands.shown(request)} {how}: {tail}",
            phase=phase,
            log_tail=tail,
        )

    def _become_ready(self, cause: str) -> None:
        if self._channel is None or self._channel.lost.done():
            self._loss = self._loss or (self._channel.lost.result() if self._channel else "removed")
            raise SandboxLost(f"sandbox {self.id} was lost while it started: {self._loss}", reason=self._loss)
        self._lifecycle.to("ready", cause)

    async def _abort_start(self, error: BaseException) -> None:
        """Remove what exists of a sandbox that did not start because of ``error``."""
        requested = self.state != "pending"
        self._lifecycle.to("failed", f"{type(error).__name__}: {error}")
        # An engine that does not answer cannot remove anything either: do not wait for a second timeout.
        silent = isinstance(error, EngineUnavailable) and self._channel is None
        if requested and not (silent and await self._registration.expire()):
            # Not known: how far the back end came. Removing what does not exist is harmless.
            try:
                await self.close(remove=True)
            except SandboxError as problem:
                _log.warning("sandbox %s, which did not start, was not removed: %s", self.id, problem)
        await self._release_backend()

    async def _close(self, remove: bool) -> None:
        self._expiry.stop()
        if self.state != "stopping":
            self._lifecycle.to("stopping", "time to live ended" if self._expiry.expired else "close")
        self._loss = self._loss or "removed"
        if self._channel is not None:
            with contextlib.suppress(asyncio.TimeoutError, SandboxError):
                await asyncio.wait_for(self._channel.close(), ANSWER_GRACE)
        if self._diagnosis is not None:
            await asyncio.wait({self._diagnosis})  # the removal deletes the engine's record
        if remove:
            try:
                await self._engine(self.backend.remove(self.id), "close")
            except SandboxError:
                await self._registration.expire()
                raise
            await self._registration.unregister()
            if self._discard_origin and self._origin is not None:
                await self._engine(self.backend.discard(self._origin), "close")
        self._lifecycle.to("removed", "removed" if remove else "connection ended")
        await self._release_backend()

    # Restart and reset

    async def _start_again(
        self, cause: str, start: Callable[[str], Awaitable[Channel]], origin: Snapshot | None
    ) -> None:
        async with self._changing:
            self._check_exists()
            self._lifecycle.to("recovering", cause)
            old, self._channel, self._loss = self._channel, None, None
            try:
                # Calls that wait for an answer of the old generation fail first.
                if old is not None:
                    await asyncio.wait_for(old.close(), ANSWER_GRACE)
                channel = await self._engine(start(self.id), cause, ENGINE_TIMEOUT + self.spec.start_timeout)
                if self.state != "recovering":
                    await channel.close()
                    raise self._gone()
                self._tainted = False
                self._adopt(channel)
                await self._restore(origin)
                await self._prepare(channel)
                self._become_ready(cause)
            except BaseException as error:
                if self._lifecycle.can("unhealthy"):
                    self._loss = self._loss or "exited"
                    self._lifecycle.to("unhealthy", f"{cause} failed: {type(error).__name__}: {error}")
                raise

    async def _recreate(self, id: str) -> Channel:
        """Replace a container whose root file system is writable by a new one with the same name."""
        await self.backend.remove(id)
        channel = await self.backend.create(id, self.spec, self._registration.labels)
        if self.state != "recovering":
            # Closed meanwhile: `close` removed the old container.
            await finished(self.backend.remove(id))
        return channel

    async def _restore(self, origin: Snapshot | None) -> None:
        if origin is not None:
            await self._engine(self.backend.restore(self.id, origin), "restore", CALL_TIMEOUT)

    async def _undo_pause(self, error: BaseException) -> None:
        if self.state != "paused":
            return
        with contextlib.suppress(SandboxError):
            await self._engine(self.backend.resume(self.id), "resume")
        try:
            # An agent that answers is not frozen, independent of what the engine reports.
            assert self._channel is not None
            await self._channel.ping(ANSWER_GRACE)
            self._lifecycle.to("ready", f"pause failed: {error}")
        except (SandboxError, asyncio.TimeoutError):
            self._loss = self._loss or "engine_down"
            self._mark_unhealthy(f"pause failed: {error}")

    # Loss of the connection

    def _adopt(self, channel: Channel) -> None:
        self._channel, self._diagnosis = channel, None
        channel.lost.add_done_callback(lambda lost: self._on_lost(channel))

    def _on_lost(self, channel: Channel) -> None:
        if channel is not self._channel or channel.lost.cancelled() or self.state in ("stopping", "removed"):
            return
        self._loss = channel.lost.result()
        if self._loss == "agent_dead" and self._in_flight:
            self._diagnosis = asyncio.ensure_future(diagnose(self.backend, self.id))
        self._mark_unhealthy(f"connection lost: {self._loss}")

    def _mark_unhealthy(self, cause: str) -> None:
        if self._lifecycle.can("unhealthy"):
            self._lifecycle.to("unhealthy", cause)

    async def _probe_agent(self) -> None:
        if self._channel is not None and await self._is_silent(self._channel, PERIOD, MISSES):
            self.mark_lost("hung")

    async def _is_silent(self, channel: Channel, period: float, misses: int) -> bool:
        """Return whether the agent gives no sign of life, though it is not paused."""
        began = self._now()
        try:
            return await probe_channel(channel, period, misses) is None and not self.was_paused(began)
        except SandboxError:
            return False  # lost already, or its server is unreachable: waiting calls raise by themselves

    # Calls

    @contextlib.contextmanager
    def _work(self, cause: str) -> Iterator[Channel]:
        channel, generation = self._usable(), self.generation
        self._in_flight += 1
        if self.state == "ready":
            self._lifecycle.to("busy", cause)
        try:
            yield channel
        finally:
            self._in_flight -= 1
            if not self._in_flight and self.state == "busy" and self.generation == generation:
                self._lifecycle.to("ready", "done")

    async def _answered(self, channel: Channel, work: Awaitable[T], limit: float, grace: float = ANSWER_GRACE) -> T:
        """Return the result of ``work``, which a working agent sends within ``limit`` seconds.

        Raises ``SandboxLost`` at most 2 s later if the agent is silent, and after ``grace`` if it is not.
        """
        task = asyncio.ensure_future(work)
        try:
            with self.watched():
                await asyncio.wait({task}, timeout=limit)
                if not task.done() and grace:
                    await self._wait_overdue(channel, task, grace)
            if not task.done():
                if channel is self._channel:
                    self._loss = self._loss or "agent_dead"
                    self._mark_unhealthy(f"no answer for {limit + grace:g} s")
                raise SandboxLost(
                    f"sandbox {self.id} did not answer for {limit + grace:g} s; replace or restart it",
                    reason="agent_dead",
                )
            return task.result()
        except SandboxLost as error:
            if error.details.get("reason") == "agent_dead" and channel is self._channel and self._diagnosis is not None:
                await self._explain(error, self._diagnosis)
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _wait_overdue(self, channel: Channel, task: asyncio.Future[T], grace: float) -> None:
        """Wait for an answer that is overdue, but not for a silent agent."""
        silence = asyncio.ensure_future(self._is_silent(channel, OVERDUE_PERIOD, OVERDUE_MISSES))
        try:
            await asyncio.wait({task, silence}, return_when=asyncio.FIRST_COMPLETED)
            if silence.done() and silence.result() and channel is self._channel:
                self.mark_lost("hung")
        finally:
            await stopped([silence])
        await asyncio.wait({task}, timeout=grace)

    async def _explain(self, error: SandboxLost, diagnosis: asyncio.Future[dict[str, Any]]) -> None:
        found = await asyncio.shield(diagnosis)
        error.details.update(found)
        if "reason" in found:
            self._loss = found["reason"]
            error.args = (f"{error} (the engine: {self._loss})",)

    async def _engine(self, work: Awaitable[T], what: str, limit: float = ENGINE_TIMEOUT) -> T:
        try:
            return await asyncio.wait_for(work, limit)
        except asyncio.TimeoutError:
            raise EngineUnavailable(
                f"the engine of the {self.backend.name} back end did not {what} sandbox {self.id} within {limit:g} s"
            ) from None

    def _usable(self) -> Channel:
        """Return the channel of a sandbox that accepts commands, or raise."""
        self._check_exists()
        if self.loss is not None:
            advice = "restart or replace it" if self._tainted else "make a new one, or restart it"
            raise SandboxLost(f"sandbox {self.id} is lost: {self.loss}; {advice}", reason=self.loss)
        if self.state not in WORKING or self._channel is None:
            raise self._invalid_state("run commands")
        return self._channel

    def _check_exists(self) -> None:
        if self._expiry.expired:
            raise SandboxExpired(f"sandbox {self.id} has outlived its time to live; set ttl, or extend it in time")
        if self.state in ("stopping", "removed", "failed"):
            raise self._gone()

    def _gone(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self.id} is {self.state}", reason="removed")

    def _invalid_state(self, what: str) -> InvalidTransition:
        return InvalidTransition(f"sandbox {self.id} is {self.state} and cannot {what} now", state=self.state)
