"""Sandboxes as hardened containers of a Docker engine (20.10 or newer).

The main process of a container is the agent, which needs nothing from the image.

Invariant: what ``create`` started to create is removed when it fails or is cancelled, and nothing else is touched: only
the label makes a container a sandbox, not its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, ClassVar

from agentkit.errors import ImageError, InvalidTransition, SandboxError, SandboxLost, StartTimeout, UnsupportedFeature
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import seccomp
from agentkit.sandboxes.agent.channel import AgentChannel, AgentListener
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends import agents
from agentkit.sandboxes.backends.docker import options, snapshots
from agentkit.sandboxes.backends.docker.engine import DockerEngine, EngineRefused
from agentkit.sandboxes.backends.docker.images import Image, Images
from agentkit.sandboxes.backends.docker.inspection import LOG_TAIL, DockerInspector, definition, observed
from agentkit.sandboxes.backends.docker.runtime import RuntimeVolume
from agentkit.sandboxes.images import archives
from agentkit.sandboxes.reaper.labels import CREATED
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

_ATTACH_TIMEOUT = 15.0
_REMOVAL_ATTEMPTS = 5


class DockerBackend(Backend):
    """Sandboxes as containers of a Docker engine on this machine.

    Args:
        host: address of the engine's Unix socket (``unix:///path``). Default: ``$DOCKER_HOST``, or
            ``unix:///var/run/docker.sock``.

    Raises:
        UnsupportedFeature: the address is not a Unix socket.
    """

    name: ClassVar[str] = "docker"

    def __init__(self, host: str | None = None) -> None:
        self.engine = DockerEngine(host)
        self._inspector = DockerInspector(self.engine)
        self._images = Images(self.engine)
        self._runtime = RuntimeVolume(self.engine)
        self._channels: dict[str, AgentChannel] = {}

    def recipe(self) -> Mapping[str, Any]:
        return {"host": self.engine.host}

    async def start(self) -> None:
        await self.engine.start()

    async def close(self) -> None:
        self._images.close()
        self.engine.close()

    @property
    def storage(self) -> str:
        directory = self.engine.info.get("DockerRootDir") or "/"
        return directory if os.path.exists(directory) else "/"

    def check(self, spec: SandboxSpec) -> None:
        info = self.engine.info
        options.check(spec, info.get("Runtimes") or {}, int(info.get("NCPU") or os.cpu_count() or 1))
        secrets = {
            self.engine.socket: "the engine's socket",
            "/run/containerd": "the engine's sockets",
            info.get("DockerRootDir") or "/var/lib/docker": "the engine's data",
            str(paths.runtime_root()): "the sockets of all sandboxes",
        }
        options.check_mounts(spec, secrets)

    # Images

    async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
        missing = await self._images.find(image) is None
        pull = "always" if refresh else "missing"
        await self._images.ensure(SandboxSpec(image=image, pull=pull, pull_timeout=timeout))
        return missing

    async def remove_image(self, image: str, keep: Collection[str]) -> bool:
        return await self._images.remove(image, keep)

    # Creation

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.check(spec)
        image = await self._images.ensure(spec)
        runtime = await self._runtime.ensure()
        marks = options.labels(id, spec, time.time(), labels)
        directory = paths.make_sandbox_directory(id)
        body = options.container(spec, image.id, str(directory), marks, runtime, image.volumes, image.environment)
        try:
            await self._change(
                "create",
                id,
                lambda client: client.create_container_from_config(body, name=id),
                missing=ImageError(f"image {spec.image!r} was removed during the creation of {id}", image=spec.image),
            )
            return await self._start(id, spec, image, "start", lambda client: client.start(id))
        except BaseException as error:
            if isinstance(error, EngineRefused) and error.status == 409:  # the name belongs to another container
                raise
            await finished(self._clear(id, marks))
            raise

    async def _start(self, id: str, spec: SandboxSpec, image: Image | None, phase: str, start: Any) -> AgentChannel:
        """Call ``start``, which starts the main process, and connect to the agent. Raises ``StartTimeout``."""
        deadline = time.monotonic() + spec.start_timeout
        async with await agents.prepare(
            id,
            spec,
            _isolation(spec),
            env=options.loader_variables(image.environment if image else ()),
            filter=seccomp.program(capabilities=options.capabilities(spec)),
            bundled=True,
        ) as listener:
            try:
                await self._change(phase, id, start)
            except SandboxError as error:
                if options.MAIN[0] not in str(error):
                    raise
                # The volume was removed, or was not filled completely.
                await self._runtime.ensure(again=True)
                await self._change(phase, id, start)
            self._channels[id] = await self._accept(id, spec, listener, deadline)
        return self._channels[id]

    async def _accept(self, id: str, spec: SandboxSpec, listener: AgentListener, deadline: float) -> AgentChannel:
        timeout = max(0.1, deadline - time.monotonic())
        try:
            return await agents.accept(listener, spec, timeout, self._ended_early(id, listener))
        except StartTimeout as error:
            if "log_tail" not in error.details:
                error.details["log_tail"] = await self._inspector.log_tail(id)
            raise

    async def _ended_early(self, id: str, listener: AgentListener) -> StartTimeout:
        """Wait until the container has ended, and return the error."""
        pause = 0.25
        await asyncio.sleep(pause)
        while (seen := await self.inspect(id)).state == "running":
            pause = min(2 * pause, 1.0)
            await asyncio.sleep(pause)
        log = b"" if seen.state == "absent" else await self.logs(id, LOG_TAIL)
        tail = log.decode("utf-8", "replace")
        return StartTimeout(
            f"the main process of sandbox {id} ended at its start ({seen.state}, exit code {seen.exit_code}"
            f"{', out of memory' if seen.oom_killed else ''}): {tail.strip()[-500:] or 'no output'}"
            f"{listener.refused}",
            phase="agent",
            log_tail=tail,
            exit_code=seen.exit_code,
        )

    async def _clear(self, id: str, marks: Mapping[str, str]) -> None:
        """Remove what a failed ``create`` made; the reaper removes the rest when the engine is down."""
        with contextlib.suppress(SandboxError):
            found = await self._inspector.find(id)
            if found is not None and found["Config"]["Labels"].get(CREATED) != marks[CREATED]:
                return  # another container
            await self._remove_container(id)
        paths.remove_sandbox_directory(id)

    async def _change(self, what: str, id: str, job: Any, missing: SandboxError | None = None) -> None:
        """Call the engine to change sandbox ``id``, and translate its refusals."""
        try:
            await self.engine.call(f"{what} {id}", job, changes=True)
        except EngineRefused as error:
            if error.status == 404 and missing is not None:
                raise missing from error
            if error.status == 404 and what != "start":
                raise SandboxLost(f"sandbox {id} no longer exists", reason="removed") from error
            if error.status == 400:
                raise UnsupportedFeature(f"the engine refuses the specification of {id}: {error}") from error
            if what in ("start", "restart") and error.status != 409:
                raise StartTimeout(str(error), phase=what, log_tail="") from error
            raise

    # Existing sandboxes

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        found = await self._inspector.need(id)
        spec = definition(id, found)
        if not found["State"]["Running"]:
            raise await self._inspector.lost(id, observed(id, found))
        if found["State"].get("Paused"):
            raise InvalidTransition(f"sandbox {id} is paused; resume it before connecting")
        try:
            listener = await agents.listen_again(id, spec, _isolation(spec))
        except OSError as error:
            raise UnsupportedFeature(
                f"sandbox {id} belongs to another user or another AGENTKIT_RUNTIME_DIR ({error})"
            ) from error
        async with listener:
            return spec, await self._accept(id, spec, listener, time.monotonic() + _ATTACH_TIMEOUT)

    async def restart(self, id: str) -> Channel:
        found = await self._inspector.need(id)
        spec = definition(id, found)
        if (old := self._channels.pop(id, None)) is not None:
            old.lose("replaced")

        def restart(client: Any) -> None:
            from docker.errors import APIError

            # Not the engine's restart, which waits for a paused container forever.
            with contextlib.suppress(APIError):
                client.kill(id)
            client.wait(id, timeout=30)
            client.start(id)

        return await self._start(id, spec, await self._images.find(found["Image"]), "restart", restart)

    async def pause(self, id: str) -> None:
        await self._toggle(id, "pause", lambda client: client.pause(id))

    async def resume(self, id: str) -> None:
        await self._toggle(id, "resume", lambda client: client.unpause(id))

    async def _toggle(self, id: str, what: str, job: Any) -> None:
        try:
            await self._change(what, id, job)
        except EngineRefused as error:
            seen = await self.inspect(id)
            if seen.state in ("exited", "absent"):
                raise await self._inspector.lost(id, seen) from error
            raise InvalidTransition(f"cannot {what} sandbox {id}, which is {seen.state}: {error}") from error

    async def remove(self, id: str) -> None:
        if await self._inspector.find(paths.checked_id(id), queue="removal") is not None:
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
                    queue="removal",
                    changes=True,
                )
                return
            except EngineRefused as error:
                if error.status == 404:
                    return
                # 409: another process removes it. 5xx: a mount is busy for a moment.
                if attempt == _REMOVAL_ATTEMPTS - 1:
                    raise

    async def inspect(self, id: str) -> Observed:
        return await self._inspector.inspect(id)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        return await self._inspector.list(labels)

    async def logs(self, id: str, tail: int) -> bytes:
        return await self._inspector.logs(id, tail)

    def events(self) -> AsyncIterator[BackendEvent]:
        return self._inspector.events()

    # Snapshots

    async def snapshot(self, id: str, name: str) -> Snapshot:
        found = await self._inspector.need(id)
        spec = definition(id, found)
        async with agents.connected(self._channels.get(id), lambda: self.attach(id)) as channel:
            return await snapshots.take(self.engine, channel, id, name, spec, found)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        spec = definition(id, await self._inspector.need(id))
        async with agents.connected(self._channels.get(id), lambda: self.attach(id)) as channel:
            await archives.restore(channel, snapshots.directories(spec), snapshot)

    async def snapshots(self) -> Sequence[Observed]:
        return await snapshots.owned(self.engine)

    async def discard(self, snapshot: Snapshot) -> None:
        await snapshots.discard(self.engine, snapshot)


def _isolation(spec: SandboxSpec) -> str:
    return "gvisor" if spec.runtime == "runsc" else spec.runtime or "container"
