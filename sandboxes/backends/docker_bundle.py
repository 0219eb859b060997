"""The interpreter that agents run with in containers: a volume of the engine's, made once from an image with Python.

Invariant: neither what an image holds, nor what a program changes in it, matters to the agent. The volume's name is the
digest of what makes it, so that processes share it and versions of agentkit do not. A volume that was removed is made
again.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
from functools import partial
from pathlib import Path
from typing import Any

from agentkit.errors import ImageError
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent_config import SOURCE
from agentkit.sandboxes.backends import bundler
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.spec import DEFAULT_IMAGE

LABEL = "agentkit.bundle"
SOURCES = (DEFAULT_IMAGE, "agentkit/debian:bookworm", "python:3.11-slim")
"""Images whose Python is good for it, the first that the engine has. No other image is trusted with all sandboxes."""
_TIMEOUT = 120.0
_PLACE, _NAME = posixpath.split(paths.BUNDLE)


class Bundle:
    """The volume with the agent's interpreter on one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._program, self._agent = Path(bundler.__file__).read_text(), SOURCE.read_text()
        self.volume = f"agentkit-{hashlib.sha256((self._program + self._agent).encode()).hexdigest()[:16]}"
        self._lock = asyncio.Lock()
        self._there = False

    async def ensure(self, *, again: bool = False) -> str:
        """The volume's name; it is made if it is not there. ``again``: it is there, but empty or in part.

        Raises ``ImageError`` with the remedy if no image can make it, ``EngineUnavailable``.
        """
        async with self._lock:
            if again or not (self._there or await self._found()):
                await self._fill()
            self._there = True
        return self.volume

    async def _found(self) -> bool:
        try:
            await self._engine.call("find the bundle", lambda client: client.inspect_volume(self.volume))
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _fill(self) -> None:
        for image in SOURCES:
            if await self._has(image):
                await self._engine.call("make the bundle", partial(self._make, image), timeout=_TIMEOUT, changes=True)
                return
        raise ImageError(
            "the engine has no image from which the interpreter of sandboxes' agents can be taken "
            f"({', '.join(SOURCES)}); make one: agentkit sandbox build"
        )

    async def _has(self, image: str) -> bool:
        try:
            await self._engine.call("inspect image", lambda client: client.inspect_image(image))
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def _make(self, image: str, client: Any) -> None:
        client.create_volume(self.volume, labels={LABEL: "1"})
        container = client.create_container_from_config(
            {
                "Image": image,
                "Entrypoint": ["python3", "-I", "-c", self._program, _PLACE, _NAME, self._agent],
                "Cmd": [],
                "User": "0:0",
                "NetworkDisabled": True,
                "Labels": {"agentkit.build": "1"},
                "HostConfig": {
                    "NetworkMode": "none",
                    "CapDrop": ["ALL"],
                    "SecurityOpt": ["no-new-privileges"],
                    "Memory": 512 << 20,
                    "Mounts": [
                        {
                            "Type": "volume",
                            "Source": self.volume,
                            "Target": _PLACE,
                            "VolumeOptions": {"NoCopy": True},
                        }
                    ],
                },
            }
        )["Id"]
        try:
            client.start(container)
            status = client.wait(container, timeout=_TIMEOUT)["StatusCode"]
            said = client.logs(container, tail=20).decode("utf-8", "replace").strip()
        finally:
            client.remove_container(container, force=True, v=True)
        if status != 0 or not said.endswith("bundled"):
            raise ImageError(f"no interpreter for agents can be taken from {image}: {said[-500:]}", image=image)
