"""The images that sandboxes are made from: found, or pulled in bounded time.

Invariant: an image that cannot be had is an ``ImageError`` with the engine's own words, within the pull timeout; it is
never taken for a crash of a sandbox. One image is pulled once at a time, however many wait for it. Our own names
(``agentkit/…``) are never pulled: on a registry they may be a stranger's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.lane import bounded
from agentkit.sandboxes.spec import SandboxSpec

OWN = "agentkit/"


@dataclass(frozen=True)
class Image:
    id: str
    volumes: tuple[str, ...]
    """Paths that the image declares as volumes."""
    environment: tuple[str, ...] = ()
    """``NAME=value`` entries."""


class Images:
    """The images of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: SandboxSpec) -> Image:
        """The image of ``spec``, pulled as it says. Raises ``ImageError``, ``EngineUnavailable``."""
        found = None if spec.pull == "always" and not spec.image.startswith(OWN) else await self.find(spec.image)
        if found is not None:
            return found
        if spec.image.startswith(OWN):
            raise ImageError(f"image {spec.image} is not here; build it: agentkit sandbox build", image=spec.image)
        if spec.pull == "never":
            raise ImageError(
                f"image {spec.image} is not here and pull='never'; `docker pull` it, or set pull='missing'",
                image=spec.image,
            )
        await self._pull(spec.image, spec.pull_timeout)
        found = await self.find(spec.image)
        if found is None:
            raise ImageError(f"image {spec.image} was pulled, but the engine does not have it", image=spec.image)
        return found

    def close(self) -> None:
        """Wait for no pull any more."""
        for pull in self._pulls.values():
            pull.cancel()

    async def find(self, name: str) -> Image | None:
        """The image of this name or id that the engine has. Raises ``ImageError`` for a name that is none."""
        try:
            found: Mapping[str, Any] = await self._engine.call(
                "inspect image", lambda client: client.inspect_image(name)
            )
        except Refused as error:
            if error.status == 404:
                return None
            raise ImageError(f"image {name!r} cannot be used: {error}", image=name) from error
        config = found.get("Config") or {}
        return Image(found["Id"], tuple(config.get("Volumes") or ()), tuple(config.get("Env") or ()))

    async def _pull(self, name: str, timeout: float) -> None:
        if (pull := self._pulls.get(name)) is None:
            pull = self._pulls[name] = asyncio.ensure_future(self._fetch(name, timeout))
            pull.add_done_callback(lambda done: self._forget(name, done))
        try:
            await bounded(asyncio.shield(pull), timeout)
        except asyncio.TimeoutError as error:
            raise ImageError(
                f"image {name} was not pulled in {timeout:g} s (pull_timeout); is its registry reachable from the "
                f"engine? `docker pull {name}` shows what it waits for",
                image=name,
            ) from error

    def _forget(self, name: str, pull: asyncio.Task[None]) -> None:
        self._pulls.pop(name, None)
        if not pull.cancelled():
            pull.exception()

    async def _fetch(self, name: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout

        def job(client: Any) -> None:
            from docker.utils import parse_repository_tag

            repository, tag = parse_repository_tag(name)
            for message in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if "error" in message:
                    raise ImageError(f"cannot pull image {name}: the engine says: {message['error']}", image=name)
                if time.monotonic() > deadline:  # nobody waits any more: hanging up stops the engine too
                    return

        try:
            await self._engine.call(f"pull {name}", job, timeout=timeout, lane="pull")
        except Refused as error:
            raise ImageError(f"cannot pull image {name}: {error}", image=name) from error
        except EngineUnavailable as error:
            raise ImageError(f"cannot pull image {name}: {error}", image=name) from error
