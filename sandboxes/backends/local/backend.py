"""Sandboxes without a container engine: the agent in name spaces of this host, or with resource limits only.

Invariant: a channel reports the actual isolation of its sandbox, which is never weaker than the specification requires:
``check`` refuses the rest. The complete state of a sandbox is on disk, so every process of the user can list it,
connect to it and remove it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from agentkit.errors import EngineUnavailable, InvalidTransition, SandboxError, SandboxLost, StartTimeout
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import seccomp
from agentkit.sandboxes.agent.channel import AgentChannel, AgentListener
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends import agents
from agentkit.sandboxes.backends.docker.options import check_mounts
from agentkit.sandboxes.backends.local import cgroup, processes
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.backends.local.isolation import ISOLATIONS, Isolation, IsolationLevel, check_support
from agentkit.sandboxes.backends.local.observation import changes, observe_all, observed
from agentkit.sandboxes.backends.local.state import LocalState, ProcessIdentity
from agentkit.sandboxes.images import archives
from agentkit.sandboxes.reaper.labels import user_labels
from agentkit.sandboxes.reaper.owner import boot_id
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished, stopped, tracked
from agentkit.sandboxes.threads import in_thread
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

_ATTACH_TIMEOUT = 15.0
"""Seconds in which a running agent must connect; it tries about once per second."""
_POLL = 0.5
"""Seconds between two observations of sandboxes of other processes, while someone reads events."""


class LocalBackend(Backend):
    """Sandboxes as processes of this host, without a container engine.

    Args:
        isolation: ``bubblewrap`` (name spaces by ``bwrap``), ``namespaces`` (the same without ``bwrap``) or
            ``rlimits`` (resource limits only: no protection of the host). Default: the first of ``bubblewrap`` and
            ``namespaces`` that works on this machine.

    Raises:
        ValueError: ``isolation`` is unknown.
    """

    name: ClassVar[str] = "local"

    def __init__(self, isolation: IsolationLevel | None = None) -> None:
        if isolation is not None and isolation not in ISOLATIONS:
            raise ValueError(f"unknown isolation {isolation!r}; choose one of {', '.join(ISOLATIONS)}")
        self._levels: tuple[IsolationLevel, ...] = (isolation,) if isolation else ("bubblewrap", "namespaces")
        self._isolation: Isolation | None = None
        self._cgroups: Mapping[str, str] | None = None
        self._channels: dict[str, AgentChannel] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def recipe(self) -> Mapping[str, Any]:
        return {"isolation": self._levels[0] if len(self._levels) == 1 else None}

    async def start(self) -> None:
        if self._isolation is not None:
            return
        problems = []
        for level in self._levels:
            isolation = ISOLATIONS[level]()
            problem = await in_thread(isolation.problem)
            if not problem:
                self._cgroups = await in_thread(cgroup.find)
                self._isolation = isolation
                return
            problems.append(f"{level}: {problem}")
        raise EngineUnavailable(f"this machine cannot run local sandboxes. {'; '.join(problems)}")

    async def close(self) -> None:
        for channel in list(self._channels.values()):
            await channel.close()
        self._channels.clear()
        await stopped(self._watchers)

    def check(self, spec: SandboxSpec) -> None:
        check_support(spec, self._isolation.level if self._isolation else self._levels[0])
        secrets = {
            "/run/docker.sock": "a container engine's socket",
            "/run/containerd": "a container engine's sockets",
            str(paths.runtime_root()): "the sockets of all sandboxes",
        }
        check_mounts(spec, secrets)

    # Life cycle

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        isolation = self._started()
        self.check(spec)
        if local_state.load(id) is not None:
            raise SandboxError(f"local sandbox {id} already exists")
        level = isolation.level if self._cgroups is not None else f"{isolation.level} without control groups"
        state = LocalState(id, spec, {**user_labels(spec.labels), **labels}, time.time(), level, boot_id())
        try:
            state.save()
            return await self._launch(state)
        except BaseException:
            # The reaper removes the rest. The caller needs the cause of the failure.
            with contextlib.suppress(EngineUnavailable):
                await finished(self.remove(id))
            raise

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        return await self._attach(self._state(id))

    async def restart(self, id: str) -> Channel:
        state = self._state(id)
        await self._stop(state)
        await in_thread(_remove_workdir, state)
        fresh = LocalState(id, state.spec, state.labels, state.created, state.isolation, boot_id())
        return await self._launch(replace(fresh, owns_workdir=state.owns_workdir))

    async def pause(self, id: str) -> None:
        await self._freeze(self._state(id), True)

    async def resume(self, id: str) -> None:
        await self._freeze(self._state(id), False)

    async def remove(self, id: str) -> None:
        state = local_state.load(id)
        if state is not None:
            await self._stop(state)
            await in_thread(_remove_workdir, state)
        await in_thread(paths.remove_sandbox_directory, id)
        local_state.forget(id)
        self._changed.set()

    # Observation

    async def inspect(self, id: str) -> Observed:
        state = local_state.load(id)
        return Observed(id, "absent", {}) if state is None else observed(state)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        states = await in_thread(lambda: [*local_state.all_states()])
        return [observed(state) for state in states if labels.items() <= state.labels.items()]

    async def logs(self, id: str, tail: int) -> bytes:
        self._state(id)
        return processes.tail(id, tail)

    async def events(self) -> AsyncIterator[BackendEvent]:
        before = await in_thread(observe_all)
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL)
            self._changed.clear()
            now = await in_thread(observe_all)
            for event in changes(before, now):
                yield event
            before = now

    # Snapshots

    async def snapshot(self, id: str, name: str) -> Snapshot:
        state = self._state(id)
        archives.begin(self.name, name)
        try:
            async with self._connected(state) as channel:
                archive = await archives.store(channel, state.spec, _writable(state), name)
        except BaseException:
            archives.discard(name)
            archives.forget(name)
            raise
        return Snapshot(name, self.name, state.spec.image, str(archive))

    async def snapshots(self) -> Sequence[Observed]:
        return await in_thread(archives.owned, self.name)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        state = self._state(id)
        async with self._connected(state) as channel:
            await archives.restore(channel, _writable(state), snapshot)

    async def discard(self, snapshot: Snapshot) -> None:
        archives.discard(snapshot.id)
        archives.forget(snapshot.id)

    # Processes and channels

    async def _attach(self, state: LocalState) -> tuple[SandboxSpec, AgentChannel]:
        if not state.runs:
            raise _lost(state)
        if state.paused:
            raise InvalidTransition(f"sandbox {state.id} is paused; resume it before connecting")
        try:
            listener = await agents.listen_again(state.id, state.spec, state.isolation)
        except FileNotFoundError:
            raise _lost(state) from None
        return state.spec, await self._accept(listener, state, _ATTACH_TIMEOUT)

    def _started(self) -> Isolation:
        if self._isolation is None:
            raise EngineUnavailable("the local back end is not started; await backend.start() first")
        return self._isolation

    def _state(self, id: str) -> LocalState:
        state = local_state.load(id)
        if state is None:
            raise SandboxLost(f"there is no local sandbox {id}", reason="removed")
        return state

    async def _launch(self, state: LocalState) -> AgentChannel:
        """Start the processes of a sandbox whose state is on disk, and wait for its agent."""
        isolation = self._started()
        directory = paths.make_sandbox_directory(state.id)
        if self._cgroups is not None:
            state = replace(state, group=cgroup.Cgroup.of(state.id, self._cgroups))
            state.save()
        filter = None if isolation.level == "rlimits" else seccomp.program()
        async with await agents.prepare(
            state.id, state.spec, state.isolation, env={}, filter=filter, bundled=False
        ) as listener:
            starting = asyncio.ensure_future(in_thread(_start_processes, isolation, state, directory))
            starting.add_done_callback(self._watch_started)  # also if this is cancelled
            state, _ = await finished(starting)
            self._channels[state.id] = await self._accept(listener, state, state.spec.start_timeout)
        return self._channels[state.id]

    def _watch_started(self, starting: asyncio.Future[tuple[LocalState, subprocess.Popen[bytes]]]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            tracked(self._watch(*starting.result()), self._watchers)

    async def _accept(self, listener: AgentListener, state: LocalState, timeout: float) -> AgentChannel:
        async def ended() -> StartTimeout:
            await processes.wait_for_end(state.processes[-1])
            output = processes.last_output(state.id) or "no output"
            return StartTimeout(f"sandbox {state.id} ended before its agent connected: {output}", phase="agent")

        try:
            return await agents.accept(listener, state.spec, timeout, ended())
        except StartTimeout as error:
            error.details["log_tail"] = processes.last_output(state.id)
            raise

    async def _watch(self, state: LocalState, launcher: subprocess.Popen[bytes]) -> None:
        """Record how a sandbox that this process started ends."""
        await processes.wait_for_end(state.processes[-1])
        code = await in_thread(processes.exit_code, launcher)
        oom = code == 128 + signal.SIGKILL and state.group is not None and state.group.oom_kills() > 0
        self._record(state, exit_code=code, oom_killed=oom, paused=False)
        channel = self._channels.get(state.id)
        if channel is not None and channel.lost.done():
            del self._channels[state.id]

    def _record(self, state: LocalState, **changed: Any) -> None:
        """Change the state file, unless the sandbox was restarted meanwhile."""
        current = local_state.load(state.id)
        if current is not None and current.processes == state.processes:
            replace(current, **changed).update()
        self._changed.set()

    async def _stop(self, state: LocalState) -> None:
        """End the processes and remove the control group. Raises ``EngineUnavailable`` if a process survives."""
        self._record(state, ended=True)
        ended = await finished(in_thread(processes.end, state))
        if state.group is not None:
            await finished(in_thread(state.group.remove))
        if not ended:
            raise EngineUnavailable(
                f"processes of sandbox {state.id} do not end: they are blocked in the kernel (state D in ps)"
            )

    async def _freeze(self, state: LocalState, frozen: bool) -> None:
        if not state.runs:
            raise _lost(state)
        try:
            if state.group is not None and state.group.freezes:
                await finished(in_thread(state.group.freeze, frozen))
            elif not await finished(in_thread(processes.stop, state, frozen)):
                raise TimeoutError("processes are started faster than they can be stopped")
        except OSError as error:
            raise EngineUnavailable(
                f"sandbox {state.id} cannot be {'paused' if frozen else 'resumed'}: {error}"
            ) from error
        self._record(state, paused=frozen)

    @contextlib.asynccontextmanager
    async def _connected(self, state: LocalState) -> AsyncIterator[AgentChannel]:
        """Yield a channel to a sandbox; a paused sandbox runs meanwhile."""
        if state.paused:
            await self._freeze(state, False)
        try:
            async with agents.connected(self._channels.get(state.id), lambda: self._attach(state)) as channel:
                yield channel
        finally:
            if state.paused:
                await self._freeze(state, True)


def _start_processes(
    isolation: Isolation, state: LocalState, directory: Path
) -> tuple[LocalState, subprocess.Popen[bytes]]:
    if isolation.level == "rlimits":
        state = _make_workdir(state)
    if state.group is not None:
        state.group.create(state.spec.resources)
    process, main = processes.launch(isolation, state, directory)
    launcher = ProcessIdentity.of(process.pid)
    state = replace(state, processes=(main,) if launcher in (None, main) else (launcher, main))
    state.update()
    return state, process


def _writable(state: LocalState) -> list[str]:
    """Return the writable directories of the sandbox."""
    return [state.spec.workdir] if state.owns_workdir else [state.spec.workdir, "/tmp", "/dev/shm"]


def _make_workdir(state: LocalState) -> LocalState:
    """Create the working directory on the host, for a sandbox without a private file system."""
    try:
        os.mkdir(state.spec.workdir, 0o700)
    except OSError as error:
        raise SandboxError(
            f"the working directory of a sandbox without name spaces must be new: {error}; set workdir to a new path "
            "in an existing directory"
        ) from error
    state = replace(state, owns_workdir=True)
    state.save()
    return state


def _remove_workdir(state: LocalState) -> None:
    if state.owns_workdir:
        shutil.rmtree(state.spec.workdir, ignore_errors=True)


def _lost(state: LocalState) -> SandboxLost:
    return SandboxLost(
        f"local sandbox {state.id} does not run",
        reason="oom" if state.oom_killed else "exited",
        exit_code=state.exit_code,
        log_tail=processes.last_output(state.id),
    )
