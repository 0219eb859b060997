"""Sandboxes as containers of a Docker engine (20.10 or newer), hardened, with our agent inside.

Invariant: what ``create`` made is gone when it fails or is cancelled, and nothing else is ever touched: a container
counts as a sandbox only by its label, whatever its name. The main process is the agent, which needs nothing of the
image that it runs in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
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
from agentkit.sandboxes.backends import seccomp
from agentkit.sandboxes.backends.docker_bundle import Bundle
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.backends.docker_eyes import LOG_TAIL, Eyes, definition, observed
from agentkit.sandboxes.backends.docker_images import Image, Images
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

_ATTACH_TIMEOUT = 15.0
_REMOVAL_ATTEMPTS = 5


class DockerBackend(Backend):
    """Sandboxes of the engine at ``host`` (``unix:///…``; by default ``DOCKER_HOST``, or the usual socket)."""

    name: ClassVar[str] = "docker"

    def __init__(self, host: str | None = None) -> None:
        self.engine = Engine(host)
        self._eyes = Eyes(self.engine)
        self._images = Images(self.engine)
        self._bundle = Bundle(self.engine)
        self._channels: dict[str, AgentChannel] = {}

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
        bundle = await self._bundle.ensure()
        marks = options.labels(id, spec, time.time(), labels)
        directory = paths.make_sandbox_directory(id)
        body = options.container(spec, image.id, str(directory), marks, bundle, image.volumes, image.environment)
        try:
            await self._change(
                "create",
                id,
                lambda client: client.create_container_from_config(body, name=id),
                missing=ImageError(f"image {spec.image} was removed while sandbox {id} was made", image=spec.image),
            )
            return await self._run(id, spec, image, "start", lambda client: client.start(id))
        except BaseException as error:
            if isinstance(error, Refused) and error.status == 409:  # somebody else's, of that name
                raise
            await finished(self._clear(id, marks))
            raise

    async def _run(self, id: str, spec: SandboxSpec, image: Image | None, phase: str, start: Any) -> AgentChannel:
        """Start the main process, by ``start``, and connect. Raises ``StartTimeout``."""
        deadline = time.monotonic() + spec.start_timeout
        nonce, directory = agent_config.new_nonce(), paths.sandbox_directory(id)
        agent_config.prepare(
            directory,
            nonce,
            idle_timeout=spec.idle_timeout,
            env={**options.loader_variables(image.environment if image else ()), **egress.environment(spec)},
            relay_port=egress.relay_port(spec),
            filter=seccomp.program(capabilities=options.capabilities(spec)),
            bundled=True,
        )
        async with await agent_channel.listen(
            directory, nonce, isolation=_isolation(spec), workdir=spec.workdir
        ) as door:
            try:
                await self._change(phase, id, start)
            except SandboxError as error:
                if options.MAIN[0] not in str(error):
                    raise
                # The volume was removed after it was made, or its making was broken off.
                await self._bundle.ensure(again=True)
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

    async def _ended_early(self, id: str, door: agent_channel.AgentListener) -> StartTimeout | None:
        seen = await self.inspect(id)
        if seen.state == "running":
            return None
        log = b"" if seen.state == "absent" else await self.logs(id, LOG_TAIL)
        tail = log.decode("utf-8", "replace")
        return StartTimeout(
            f"the main process of sandbox {id} ended at once ({seen.state}, exit code {seen.exit_code}"
            f"{', out of memory' if seen.oom_killed else ''}): {tail.strip()[-500:] or 'it said nothing'}"
            f"{door.refused}",
            phase="agent",
            log_tail=tail,
            exit_code=seen.exit_code,
        )

    async def _clear(self, id: str, marks: Mapping[str, str]) -> None:
        """Remove what one ``create`` made; the reaper gets what an engine that is down keeps."""
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
        spec = definition(id, found)
        if not found["State"]["Running"]:
            raise await self._eyes.lost(id, observed(id, found))
        if found["State"].get("Paused"):
            raise InvalidTransition(f"sandbox {id} is paused: resume it before you connect")
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
        spec = definition(id, found)
        if (old := self._channels.pop(id, None)) is not None:
            old.lose("replaced")

        def restart(client: Any) -> None:
            # Not the engine's own restart: that one waits for a paused container for ever.
            with contextlib.suppress(_not_running()):
                client.kill(id)
            client.wait(id, timeout=30)
            client.start(id)

        return await self._run(id, spec, await self._images.find(found["Image"]), "restart", restart)

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
        spec = definition(id, found)
        async with self._channel(id) as channel:
            return await snapshots.take(self.engine, channel, id, name, spec, found)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        found = await self._eyes.need(id)
        spec = definition(id, found)
        async with self._channel(id) as channel:
            await snapshots.put_back(channel, spec, snapshot)

    async def snapshots(self) -> Sequence[Observed]:
        return await snapshots.owned(self.engine)

    async def discard(self, snapshot: Snapshot) -> None:
        await snapshots.discard(self.engine, snapshot)

    @contextlib.asynccontextmanager
    async def _channel(self, id: str) -> AsyncIterator[AgentChannel]:
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
