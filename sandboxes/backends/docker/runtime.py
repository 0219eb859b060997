"""The interpreter that runs agents in containers: a volume, filled once from an image that has Python.

Invariant: the agent does not depend on the image of its sandbox, or on changes that programs make in it. The volume is
named by the digest of its content: processes share it, versions of agentkit do not. A removed volume is created again.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import ImageError
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import runtime_builder
from agentkit.sandboxes.agent.launch import SOURCE
from agentkit.sandboxes.backends.docker.engine import DockerEngine
from agentkit.sandboxes.spec import DEFAULT_IMAGE

if TYPE_CHECKING:
    from docker import APIClient

LABEL = "agentkit.bundle"
SOURCES = (DEFAULT_IMAGE, "agentkit/debian:bookworm", "python:3.11-slim")
"""Images whose Python may be used; the first one that the engine has is taken. Other images are not trusted."""
_TIMEOUT = 120.0
_FOLDER, _NAME = posixpath.split(paths.BUNDLE)


class RuntimeVolume:
    """The volume of an engine that contains the agent's interpreter."""

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine
        self._builder, self._agent = Path(runtime_builder.__file__).read_text(), SOURCE.read_text()
        self.name = f"agentkit-{hashlib.sha256((self._builder + self._agent).encode()).hexdigest()[:16]}"
        self._lock = asyncio.Lock()
        self._ready = False

    async def ensure(self, *, again: bool = False) -> str:
        """Return the name of the volume; create and fill it if necessary.

        Args:
            again: fill it although it exists, because it is incomplete.

        Raises:
            ImageError: the engine has no image from which the interpreter can be taken.
            EngineUnavailable: the engine does not answer.
        """
        async with self._lock:
            if again or not (self._ready or await self._exists()):
                await self._fill()
            self._ready = True
        return self.name

    async def _exists(self) -> bool:
        return await self._engine.find("inspect volume", lambda client: client.inspect_volume(self.name)) is not None

    async def _fill(self) -> None:
        for image in SOURCES:
            if await self._engine.find("inspect image", lambda client, image=image: client.inspect_image(image)):
                await self._engine.call("fill volume", partial(self._build, image), timeout=_TIMEOUT, changes=True)
                return
        raise ImageError(
            f"no image with an interpreter for agents ({', '.join(SOURCES)}); run `agentkit sandbox build`"
        )

    def _build(self, image: str, client: APIClient) -> None:
        client.create_volume(self.name, labels={LABEL: "1"})
        mount = {"Type": "volume", "Source": self.name, "Target": _FOLDER, "VolumeOptions": {"NoCopy": True}}
        command = ["python3", "-I", "-c", self._builder, _FOLDER, _NAME, self._agent]
        host_config = {"Memory": 512 << 20, "Mounts": [mount]}
        status, output = run_once(client, image, command, _TIMEOUT, host_config, user="0:0")
        if status != 0 or not output.strip().endswith("bundled"):
            raise ImageError(f"cannot take the interpreter of agents from {image}: {output[-500:]}", image=image)


def run_once(
    client: APIClient,
    image: str,
    command: list[str],
    timeout: float,
    host_config: dict[str, Any] | None = None,
    user: str = "",
) -> tuple[int, str]:
    """Run a trusted command in a container without network; return its exit status and the end of its output."""
    isolation = {"NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"]}
    config: Any = {
        "Image": image,
        "Entrypoint": command,
        "Cmd": [],
        "User": user,
        "NetworkDisabled": True,
        "Labels": {"agentkit.build": "1"},
        "HostConfig": {**isolation, **(host_config or {})},
    }
    container = client.create_container_from_config(config)["Id"]
    try:
        client.start(container)
        status = client.wait(container, timeout=int(timeout))["StatusCode"]
        return status, client.logs(container, tail=50).decode("utf-8", "replace")
    finally:
        client.remove_container(container, force=True, v=True)
