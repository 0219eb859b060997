"""Sandboxes without a container engine: the agent in name spaces on this host, or with mere limits if asked by name.

Invariant: the isolation that a sandbox runs under is the one that its channel reports, and never less than what the
specification asks for: ``check`` refuses the rest. All that this back end knows of a sandbox is on disk, so that any
process of the user can list it, connect to it, and remove it.
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

from agentkit.errors import EngineUnavailable, SandboxError, SandboxLost, StartTimeout
from agentkit.sandboxes import agent_config, egress, paths
from agentkit.sandboxes.agent_channel import AgentChannel, AgentListener, listen
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends import archives, local_cgroup, local_launch, local_state, seccomp
from agentkit.sandboxes.backends.docker_options import check_mounts
from agentkit.sandboxes.backends.local_cages import CAGES, Cage, Isolation, unsupported
from agentkit.sandboxes.backends.local_sight import changes, observed, sights
from agentkit.sandboxes.backends.local_state import Known, LocalState
from agentkit.sandboxes.owner import boot_id
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

_ATTACH = 15.0
"""Seconds in which a running agent must come; it looks about once a second."""
_LOOK_EVERY = 0.5
"""Seconds between two looks for sandboxes that others made, while somebody listens to events."""


class LocalBackend(Backend):
    """``isolation``: the one to use; by default the strongest of bubblewrap and name spaces that this machine gives."""

    name: ClassVar[str] = "local"

    def __init__(self, isolation: Isolation | None = None) -> None:
        if isolation is not None and isolation not in CAGES:
            raise ValueError(f"isolation={isolation!r} is none of {', '.join(CAGES)}")
        self._levels: tuple[Isolation, ...] = (isolation,) if isolation else ("bubblewrap", "namespaces")
        self._cage: Cage | None = None
        self._site: local_cgroup.Site | None = None
        self._channels: dict[str, AgentChannel] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stirred = asyncio.Event()

    def recipe(self) -> Mapping[str, Any]:
        return {"isolation": self._levels[0] if len(self._levels) == 1 else None}

    async def start(self) -> None:
        if self._cage is not None:
            return
        problems = []
        for level in self._levels:
            cage = CAGES[level]()
            problem = await asyncio.to_thread(cage.problem)
            if not problem:
                self._site = await asyncio.to_thread(local_cgroup.find)
                self._cage = cage
                return
            problems.append(f"{level}: {problem}")
        raise EngineUnavailable(f"no local sandboxes on this machine. {'; '.join(problems)}")

    async def close(self) -> None:
        for channel in list(self._channels.values()):
            await channel.close()
        self._channels.clear()
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)

    def check(self, spec: SandboxSpec) -> None:
        unsupported(spec, self._cage.level if self._cage else self._levels[0])
        secrets = {
            os.path.realpath("/run/docker.sock"): "a container engine's socket",
            os.path.realpath("/run/containerd"): "a container engine's own sockets",
            os.path.realpath(paths.runtime_root()): "the sockets of all sandboxes",
        }
        check_mounts({mount.source: os.path.realpath(mount.source) for mount in spec.mounts}, secrets)

    # Life cycle

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        cage = self._started()
        self.check(spec)
        if local_state.load(id) is not None:
            raise SandboxError(f"there is a local sandbox {id} already")
        user_labels = {f"agentkit.user.{key}": value for key, value in spec.labels.items()}
        state = LocalState(id, spec, {**user_labels, **labels}, time.time(), self._isolation(cage), boot_id())
        try:
            state.save()
            return await self._launch(state)
        except BaseException:
            # What cannot be removed now, the reaper removes; why it was not made is what the caller has to know.
            with contextlib.suppress(EngineUnavailable):
                await finished(self.remove(id))
            raise

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        return await self._attach(self._state(id))

    async def restart(self, id: str) -> Channel:
        state = self._state(id)
        await self._stop(state)
        await asyncio.to_thread(_remove_workdir, state)
        fresh = replace(
            state,
            processes=(),
            group=None,
            paused=False,
            exit_code=None,
            oom_killed=False,
            ended=False,
            boot=boot_id(),
        )
        return await self._launch(fresh)

    async def pause(self, id: str) -> None:
        await self._freeze(self._state(id), True)

    async def resume(self, id: str) -> None:
        await self._freeze(self._state(id), False)

    async def remove(self, id: str) -> None:
        state = local_state.load(id)
        if state is not None:
            await self._stop(state)
            await asyncio.to_thread(_remove_workdir, state)
        await asyncio.to_thread(paths.remove_sandbox_directory, id)
        local_state.forget(id)
        self._stirred.set()

    # Looking

    async def inspect(self, id: str) -> Observed:
        state = local_state.load(id)
        return Observed(id, "absent", {}) if state is None else observed(state)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        states = await asyncio.to_thread(lambda: [*local_state.all_states()])
        return [observed(state) for state in states if labels.items() <= state.labels.items()]

    async def logs(self, id: str, tail: int) -> bytes:
        self._state(id)
        return local_launch.tail(id, tail)

    async def events(self) -> AsyncIterator[BackendEvent]:
        before = await asyncio.to_thread(sights)
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stirred.wait(), _LOOK_EVERY)
            self._stirred.clear()
            now = await asyncio.to_thread(sights)
            for event in changes(before, now):
                yield event
            before = now

    # Snapshots

    async def snapshot(self, id: str, name: str) -> Snapshot:
        state = self._state(id)
        archive, (hidden, _) = archives.path_of(name), archives.begin(self.name, name)
        try:
            async with self._connected(state) as channel:
                await archives.store(channel, state.spec, _writable(state), hidden)
            os.replace(hidden, archive)
        except BaseException:
            archives.discard(name)
            archives.forget(name)
            raise
        return Snapshot(name, self.name, state.spec.image, str(archive))

    async def snapshots(self) -> Sequence[Observed]:
        return await asyncio.to_thread(archives.owned, self.name)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        state = self._state(id)
        async with self._connected(state) as channel:
            await archives.put_back(channel, _writable(state), snapshot)

    async def discard(self, snapshot: Snapshot) -> None:
        archives.discard(snapshot.id)
        archives.forget(snapshot.id)

    # Inside

    async def _attach(self, state: LocalState) -> tuple[SandboxSpec, AgentChannel]:
        if not state.runs:
            raise _lost(state)
        directory = paths.sandbox_directory(state.id)
        try:
            listener = await _listener(directory, agent_config.nonce_of(directory), state)
        except FileNotFoundError:
            raise _lost(state) from None
        channel = await self._accept(listener, state, _ATTACH)
        egress.start(channel, state.spec.network)
        return state.spec, channel

    def _started(self) -> Cage:
        if self._cage is None:
            raise EngineUnavailable("the local back end is not started: await backend.start() first")
        return self._cage

    def _isolation(self, cage: Cage) -> str:
        return cage.level if self._site is not None else f"{cage.level} without control groups"

    def _state(self, id: str) -> LocalState:
        state = local_state.load(id)
        if state is None:
            raise SandboxLost(f"there is no local sandbox {id}", reason="removed")
        return state

    async def _launch(self, state: LocalState) -> AgentChannel:
        """Start the processes of a sandbox whose state is on disk and wait for its agent."""
        cage = self._started()
        directory = paths.make_sandbox_directory(state.id)
        nonce = agent_config.new_nonce()
        agent_config.prepare(
            directory,
            nonce,
            idle_timeout=state.spec.idle_timeout,
            env=egress.environment(state.spec),
            relay_port=egress.relay_port(state.spec),
            filter=None if cage.level == "rlimits" else seccomp.program(),
        )
        if self._site is not None:
            state = replace(state, group=self._site.group(state.id))
            state.save()
        listener = await _listener(directory, nonce, state)
        try:
            running = asyncio.ensure_future(asyncio.to_thread(self._run, cage, state, directory))
            running.add_done_callback(self._begin_to_watch)  # also if this is cancelled
            state, _ = await finished(running)
            channel = await self._accept(listener, state, state.spec.start_timeout)
        finally:
            await listener.close()
        egress.start(channel, state.spec.network)
        self._channels[state.id] = channel
        return channel

    @staticmethod
    def _run(cage: Cage, state: LocalState, directory: Path) -> tuple[LocalState, subprocess.Popen[bytes]]:
        if cage.level == "rlimits":
            state = _make_workdir(state)
        if state.group is not None:
            state.group.make(state.spec.resources)
        process, main = local_launch.launch(cage, state, directory)
        launcher = Known.of(process.pid)
        known = (main,) if launcher in (None, main) else (launcher, main)
        state = replace(state, processes=known)
        state.update()
        return state, process

    def _begin_to_watch(self, running: asyncio.Future[tuple[LocalState, subprocess.Popen[bytes]]]) -> None:
        if not running.cancelled() and running.exception() is None:
            watcher = asyncio.ensure_future(self._watch(*running.result()))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)

    async def _accept(self, listener: AgentListener, state: LocalState, timeout: float) -> AgentChannel:
        """The agent's channel, unless the sandbox ends first."""
        arrival = asyncio.ensure_future(listener.accept(timeout))
        end = asyncio.ensure_future(local_launch.ended(state.processes[-1]))
        try:
            await asyncio.wait([arrival, end], return_when=asyncio.FIRST_COMPLETED)
            if not arrival.done():
                raise StartTimeout(f"sandbox {state.id} ended before its agent came: {_said(state.id)}", phase="agent")
            return arrival.result()
        except StartTimeout as error:
            raise StartTimeout(f"{error}", phase="agent", log_tail=_said(state.id)) from None
        except BaseException:
            if arrival.done() and not arrival.cancelled() and arrival.exception() is None:
                await arrival.result().close()
            raise
        finally:
            for waiting in (arrival, end):
                waiting.cancel()
            await asyncio.wait([arrival, end])
            await listener.close()

    async def _watch(self, state: LocalState, launcher: subprocess.Popen[bytes]) -> None:
        """Write down how a sandbox that this process started has ended, and tell whoever uses it."""
        await local_launch.ended(state.processes[-1])
        code = await asyncio.to_thread(local_launch.exit_code, launcher)
        oom = code == 128 + signal.SIGKILL and state.group is not None and state.group.oom_kills() > 0
        self._note(state, exit_code=code, oom_killed=oom, paused=False)
        channel = self._channels.get(state.id)
        if channel is not None and channel.lost.done():
            del self._channels[state.id]

    def _note(self, state: LocalState, **changed: Any) -> None:
        """Write down what became of this start of a sandbox."""
        present = local_state.load(state.id)
        if present is not None and present.processes == state.processes:
            replace(present, **changed).update()
        self._stirred.set()

    async def _stop(self, state: LocalState) -> None:
        """End the processes and remove the control group. Raises ``EngineUnavailable`` if something survives."""
        self._note(state, ended=True)
        over = await finished(asyncio.to_thread(local_launch.end, state))
        if state.group is not None:
            await finished(asyncio.to_thread(state.group.remove))
        if not over:
            raise EngineUnavailable(
                f"processes of sandbox {state.id} do not die: they hang in the kernel (ps shows them in state D)"
            )

    async def _freeze(self, state: LocalState, frozen: bool) -> None:
        if not state.runs:
            raise _lost(state)
        try:
            if state.group is not None and state.group.freezes:
                await finished(asyncio.to_thread(state.group.freeze, frozen))
            elif not await finished(asyncio.to_thread(local_launch.stop, state, frozen)):
                raise TimeoutError("it starts processes faster than they can be stopped")
        except OSError as error:
            raise EngineUnavailable(
                f"sandbox {state.id} cannot be {'paused' if frozen else 'resumed'}: {error}"
            ) from error
        self._note(state, paused=frozen)

    @contextlib.asynccontextmanager
    async def _connected(self, state: LocalState) -> AsyncIterator[AgentChannel]:
        """A channel to a sandbox, which runs meanwhile even if it is paused."""
        if state.paused:
            await self._freeze(state, False)
        channel = self._channels.get(state.id)
        own = channel is None or channel.lost.done()
        try:
            if channel is None or channel.lost.done():
                _, channel = await self._attach(state)
            try:
                yield channel
            finally:
                if own:
                    await channel.close()
        finally:
            if state.paused:
                await self._freeze(state, True)


async def _listener(directory: Path, nonce: str, state: LocalState) -> AgentListener:
    return await listen(directory, nonce, isolation=state.isolation, workdir=state.spec.workdir)


def _writable(state: LocalState) -> list[str]:
    """The directories that belong to the sandbox alone."""
    return [state.spec.workdir] if state.owns_workdir else [state.spec.workdir, "/tmp", "/dev/shm"]


def _make_workdir(state: LocalState) -> LocalState:
    """Without a file system of its own, a sandbox works in a new directory of the host's."""
    try:
        os.mkdir(state.spec.workdir, 0o700)
    except OSError as error:
        raise SandboxError(
            f"the working directory of a sandbox without name spaces must be new: {error}; set workdir to a path that "
            "does not exist, in a directory that does"
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
        log_tail=_said(state.id),
    )


def _said(id: str) -> str:
    return local_launch.tail(id, 20).decode("utf-8", "replace").strip() or "it wrote nothing"
