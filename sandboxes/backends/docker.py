"""Sandboxes as containers of a Docker engine (20.10 or newer), hardened, with our agent inside.

Invariant: what ``create`` made is gone when it fails or is cancelled, and nothing else is ever touched: a container
counts as a sandbox only by its label, whatever its name. The main process is the agent; where an image has no Python
for it, it is a shell that waits, and the engine's own exec is the way in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from agentkit.errors import (
    ImageError,
    InvalidTransition,
    SandboxError,
    SandboxLost,
    StartTimeout,
    UnsupportedFeature,
)
from agentkit.sandboxes import agent_channel, agent_config, egress, paths
from agentkit.sandboxes.agent_channel import AgentChannel
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends import docker_options as options
from agentkit.sandboxes.backends import docker_snapshots as snapshots
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.backends.docker_exec import DockerExecChannel
from agentkit.sandboxes.backends.docker_eyes import LOG_TAIL, Eyes, definition, observed
from agentkit.sandboxes.backends.docker_images import Image, Images
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

_ATTACH_TIMEOUT = 15.0
_REMOVAL_ATTEMPTS = 5
_NO_PYTHON = (b"SyntaxError", b"ModuleNotFoundError", b"ImportError", b"No module named", b"EOFError")

DockerChannel = AgentChannel | DockerExecChannel


class _NoPython(Exception):
    """The image has no Python that the agent runs with."""


class DockerBackend(Backend):
    """Sandboxes of the engine at ``host`` (``unix:///…``; by default ``DOCKER_HOST``, or the usual socket)."""

    name: ClassVar[str] = "docker"

    def __init__(self, host: str | None = None) -> None:
        self.engine = Engine(host)
        self._eyes = Eyes(self.engine)
        self._images = Images(self.engine)
        self._without_python: set[str] = set()
        self._channels: dict[str, DockerChannel] = {}

    def recipe(self) -> Mapping[str, Any]:
        return {"host": self.engine.host}

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        self._images.close()
        self.engine.close()

    def check(self, spec: SandboxSpec) -> None:
        info = self.engine.info
        options.check(spec, info.get("Runtimes") or {}, int(info.get("NCPU") or os.cpu_count() or 1))
        if spec.mounts:
            secrets = {
                os.path.realpath(self.engine.socket): "the engine's socket",
                os.path.realpath("/run/containerd"): "the engine's own sockets",
                os.path.realpath(info.get("DockerRootDir") or "/var/lib/docker"): "the engine's data",
                os.path.realpath(paths.runtime_root()): "the sockets of all sandboxes",
            }
            options.check_mounts({mount.source: os.path.realpath(mount.source) for mount in spec.mounts}, secrets)

    # Making

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.check(spec)
        image = await self._images.ensure(spec)
        if image.id not in self._without_python:
            try:
                return await self._make(id, spec, labels, image, "agent")
            except _NoPython:
                self._without_python.add(image.id)
        return await self._make(id, spec, labels, image, "exec")

    async def _make(
        self, id: str, spec: SandboxSpec, labels: Mapping[str, str], image: Image, transport: options.Transport
    ) -> DockerChannel:
        marks = options.labels(id, spec, transport, time.time(), labels)
        directory = paths.make_sandbox_directory(id)
        body = options.container(spec, image.id, str(directory), marks, transport, image.volumes)
        try:
            await self._change(
                "create",
                id,
                lambda client: client.create_container_from_config(body, name=id),
                missing=ImageError(f"image {spec.image} was removed while sandbox {id} was made", image=spec.image),
            )
            return await self._run(id, spec, transport, "start", lambda client: client.start(id))
        except BaseException as error:
            if isinstance(error, Refused) and error.status == 409:  # somebody else's, of that name
                raise
            await finished(self._clear(id, marks))
            raise

    async def _run(
        self, id: str, spec: SandboxSpec, transport: options.Transport, phase: str, start: Any
    ) -> DockerChannel:
        """Start the main process, by ``start``, and connect. Raises ``StartTimeout``, ``_NoPython``."""
        deadline = time.monotonic() + spec.start_timeout
        isolation = _isolation(spec)
        if transport == "exec":
            if spec.network.mode == "allow":
                raise UnsupportedFeature(
                    f"network=allow needs Python 3.8 or newer in the image, and {spec.image} has none"
                )
            await self._change(phase, id, start)
            channel = DockerExecChannel(self.engine, id, spec, isolation, self._eyes.death)
            try:
                await self._answer(id, channel, deadline)
            except BaseException:
                await finished(channel.close())
                raise
        else:
            nonce, directory = agent_config.new_nonce(), paths.sandbox_directory(id)
            agent_config.prepare(
                directory,
                nonce,
                idle_timeout=spec.idle_timeout,
                env=egress.environment(spec),
                relay_port=egress.relay_port(spec),
            )
            async with await agent_channel.listen(directory, nonce, isolation=isolation, workdir=spec.workdir) as door:
                await self._change(phase, id, start)
                channel = await self._agent(id, door, deadline)
            egress.start(channel, spec.network)
        self._channels[id] = channel
        return channel

    async def _agent(self, id: str, door: agent_channel.AgentListener, deadline: float) -> AgentChannel:
        """The agent's connection; its end, if it ends before, is noticed."""
        arrival = asyncio.ensure_future(door.accept(max(0.1, deadline - time.monotonic())))
        pause = 0.25
        try:
            while not arrival.done():
                await asyncio.wait({arrival}, timeout=pause)
                if not arrival.done() and (ended := await self._ended_early(id, door)) is not None:
                    if ended.details["exit_code"] in (126, 127) or any(
                        word in ended.details["log"] for word in _NO_PYTHON
                    ):
                        raise _NoPython
                    raise ended
                pause = min(2 * pause, 1.0)
            return arrival.result()
        except StartTimeout as error:
            if "log_tail" not in error.details:
                error.details["log_tail"] = await self._eyes.log_tail(id)
            raise
        except asyncio.CancelledError:
            if arrival.done() and not arrival.cancelled() and arrival.exception() is None:
                await arrival.result().close()
            raise
        finally:
            arrival.cancel()

    async def _answer(self, id: str, channel: DockerExecChannel, deadline: float) -> None:
        """Wait until a sandbox without an agent runs a command."""
        try:
            await channel.ping(max(0.1, deadline - time.monotonic()))
        except asyncio.TimeoutError:
            raise StartTimeout(
                f"sandbox {id} did not run a command in time", phase="exec", log_tail=await self._eyes.log_tail(id)
            ) from None
        except SandboxError as error:
            ended = await self._ended_early(id)
            if ended is not None and ended.details["exit_code"] in (126, 127):
                raise ImageError(
                    "the image has neither Python 3.8 nor a shell at /bin/sh: nothing can be run in it", id=id
                ) from error
            raise ended or error from error

    async def _ended_early(self, id: str, door: agent_channel.AgentListener | None = None) -> StartTimeout | None:
        seen = await self.inspect(id)
        if seen.state == "running":
            return None
        log = b"" if seen.state == "absent" else await self.logs(id, LOG_TAIL)
        tail = log.decode("utf-8", "replace")
        return StartTimeout(
            f"the main process of sandbox {id} ended at once ({seen.state}, exit code {seen.exit_code}"
            f"{', out of memory' if seen.oom_killed else ''}): {tail.strip()[-500:] or 'it said nothing'}"
            f"{door.refused if door is not None else ''}",
            phase="agent",
            log_tail=tail,
            log=log,
            exit_code=seen.exit_code,
        )

    async def _clear(self, id: str, marks: Mapping[str, str]) -> None:
        """Remove what one ``_make`` made; the reaper gets what an engine that is down keeps."""
        with contextlib.suppress(SandboxError):
            found = await self._eyes.find(id)
            if found is not None and found["Config"]["Labels"].get(options.CREATED) != marks[options.CREATED]:
                return  # not the one that was made here
            await self._remove_container(id)
        paths.remove_sandbox_directory(id)

    async def _change(self, what: str, id: str, job: Any, missing: SandboxError | None = None) -> None:
        """A call that changes sandbox ``id``; what the engine refuses becomes the error that the caller means."""
        try:
            await self.engine.call(f"{what} {id}", job, changes=True)
        except Refused as error:
            if error.status == 404 and missing is not None:
                raise missing from error
            if error.status == 404 and what != "start":
                raise SandboxLost(f"there is no sandbox {id} any more", reason="removed") from error
            if error.status == 400:
                raise UnsupportedFeature(f"the engine refuses the specification of {id}: {error}") from error
            if what in ("start", "restart") and error.status != 409:
                raise StartTimeout(str(error), phase=what, log_tail="") from error
            raise

    # What is there already

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        found = await self._eyes.need(id)
        spec, transport = definition(id, found)
        if not found["State"]["Running"]:
            raise await self._eyes.lost(id, observed(id, found))
        if found["State"].get("Paused"):
            raise InvalidTransition(f"sandbox {id} is paused: resume it before you connect")
        if transport == "exec":
            return spec, DockerExecChannel(self.engine, id, spec, _isolation(spec), self._eyes.death)
        directory = paths.sandbox_directory(id)
        try:
            nonce = agent_config.nonce_of(directory)
        except OSError as error:
            raise UnsupportedFeature(
                f"sandbox {id} belongs to another user, or to another AGENTKIT_RUNTIME_DIR: cannot read {directory}"
            ) from error
        async with await agent_channel.listen(
            directory, nonce, isolation=_isolation(spec), workdir=spec.workdir
        ) as door:
            channel = await self._agent(id, door, time.monotonic() + _ATTACH_TIMEOUT)
        egress.start(channel, spec.network)
        return spec, channel

    async def restart(self, id: str) -> Channel:
        found = await self._eyes.need(id)
        spec, transport = definition(id, found)
        if (old := self._channels.pop(id, None)) is not None:
            old.lose("replaced")

        def restart(client: Any) -> None:
            # Not the engine's own restart: that one waits for a paused container for ever.
            with contextlib.suppress(_not_running()):
                client.kill(id)
            client.wait(id, timeout=30)
            client.start(id)

        try:
            return await self._run(id, spec, transport, "restart", restart)
        except _NoPython as error:
            raise StartTimeout(f"the agent of sandbox {id} did not start again", phase="agent") from error

    async def pause(self, id: str) -> None:
        await self._toggle(id, "pause", lambda client: client.pause(id))

    async def resume(self, id: str) -> None:
        await self._toggle(id, "resume", lambda client: client.unpause(id))

    async def _toggle(self, id: str, what: str, job: Any) -> None:
        try:
            await self._change(what, id, job)
        except Refused as error:
            seen = await self.inspect(id)
            if seen.state in ("exited", "absent"):
                raise await self._eyes.lost(id, seen) from error
            raise InvalidTransition(f"cannot {what} sandbox {id}, which is {seen.state}: {error}") from error

    async def remove(self, id: str) -> None:
        if not paths.is_id(id):
            raise ValueError(f"{id!r} is no sandbox id: ak- and 16 hexadecimal digits")
        if await self._eyes.find(id, lane="removal") is not None:
            await self._remove_container(id)
        paths.remove_sandbox_directory(id)
        if (channel := self._channels.pop(id, None)) is not None:
            channel.lose("removed")

    async def _remove_container(self, id: str) -> None:
        for attempt in range(_REMOVAL_ATTEMPTS):
            await asyncio.sleep(0.2 * attempt * attempt)
            try:
                await self.engine.call(
                    f"remove {id}",
                    lambda client: client.remove_container(id, force=True, v=True),
                    lane="removal",
                    changes=True,
                )
                return
            except Refused as error:
                if error.status == 404:
                    return
                # 409: being removed by somebody else. 5xx: a mount that is busy for a moment.
                if attempt == _REMOVAL_ATTEMPTS - 1:
                    raise

    async def inspect(self, id: str) -> Observed:
        return await self._eyes.inspect(id)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        return await self._eyes.list(labels)

    async def logs(self, id: str, tail: int) -> bytes:
        return await self._eyes.logs(id, tail)

    def events(self) -> AsyncIterator[BackendEvent]:
        return self._eyes.events()

    # Snapshots

    async def snapshot(self, id: str, name: str) -> Snapshot:
        found = await self._eyes.need(id)
        spec, _ = definition(id, found)
        async with self._channel(id) as channel:
            return await snapshots.take(self.engine, channel, id, name, spec, found)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        found = await self._eyes.need(id)
        spec, _ = definition(id, found)
        async with self._channel(id) as channel:
            await snapshots.put_back(channel, spec, snapshot)

    async def discard(self, snapshot: Snapshot) -> None:
        await snapshots.discard(self.engine, snapshot)

    @contextlib.asynccontextmanager
    async def _channel(self, id: str) -> AsyncIterator[DockerChannel]:
        """The channel that there is, or one for the moment."""
        channel = self._channels.get(id)
        if channel is not None and not channel.lost.done():
            yield channel
            return
        _, channel = await self.attach(id)
        try:
            yield channel  # pyright: ignore[reportReturnType]
        finally:
            await finished(channel.close())


def _isolation(spec: SandboxSpec) -> str:
    return {None: "container", "runsc": "gvisor"}.get(spec.runtime, spec.runtime or "container")


def _not_running() -> type[Exception]:
    from docker.errors import APIError

    return APIError
