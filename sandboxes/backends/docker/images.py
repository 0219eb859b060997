"""Images of the engine: find them, or pull them within a timeout.

Invariant: an image that cannot be obtained is an ``ImageError`` with the engine's message, within the pull timeout, and
never looks like a crash of a sandbox. Concurrent requests for an image share one pull. Names of agentkit
(``agentkit/…``) are never pulled: in a registry they could belong to someone else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes.backends.docker.engine import DockerEngine, EngineRefused
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import bounded, retrieve

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

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine
        self._pulls: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, spec: SandboxSpec) -> Image:
        """Return the image of ``spec`` and pull it if necessary. Raises ``ImageError``, ``EngineUnavailable``."""
        name, own = spec.image, spec.image.startswith(OWN)
        image = None if spec.pull == "always" and not own else await self.find(name)
        if image is not None:
            return image
        if own:
            raise ImageError(f"no image {name!r}; build it with `agentkit sandbox build`", image=name)
        if spec.pull == "never":
            raise ImageError(f"no image {name!r} and pull='never'; `docker pull` it, or set pull='missing'", image=name)
        await self._pull(name, spec.pull_timeout)
        image = await self.find(name)
        if image is None:
            raise ImageError(f"image {name!r} was pulled, but the engine does not have it", image=name)
        return image

    async def remove(self, name: str, keep: Collection[str]) -> bool:
        """Remove an image; False if its name or id is in ``keep`` or a container uses it. Raises ``SandboxError``."""
        image = await self.find(name)
        if image is None:
            return True
        if name in keep or image.id in keep:
            return False
        try:
            # Without force, the engine refuses to remove an image that a container uses.
            await self._engine.call(
                f"remove image {name}", lambda client: client.remove_image(name), queue="removal", changes=True
            )
        except EngineRefused as error:
            if error.status == 409:
                return False
            if error.status != 404:
                raise
        return True

    def close(self) -> None:
        """Cancel the pulls."""
        for pull in self._pulls.values():
            pull.cancel()

    async def find(self, name: str) -> Image | None:
        """Return the image with this name or id; None if the engine does not have it."""
        try:
            found = await self._engine.find("inspect image", lambda client: client.inspect_image(name))
        except EngineRefused as error:
            raise ImageError(f"image {name!r} cannot be used: {error}", image=name) from error
        if found is None:
            return None
        config = found.get("Config") or {}
        return Image(found["Id"], tuple(config.get("Volumes") or ()), tuple(config.get("Env") or ()))

    async def _pull(self, name: str, timeout: float) -> None:
        if (pull := self._pulls.get(name)) is None:
            pull = self._pulls[name] = asyncio.ensure_future(self._fetch(name, timeout))
            pull.add_done_callback(retrieve)
            pull.add_done_callback(lambda _: self._pulls.pop(name, None))
        try:
            await bounded(asyncio.shield(pull), timeout)
        except asyncio.TimeoutError as error:
            raise ImageError(
                f"image {name!r} was not pulled in {timeout:g} s (pull_timeout); check with `docker pull {name}` that "
                "the engine can reach the registry",
                image=name,
            ) from error

    async def _fetch(self, name: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout

        def job(client: Any) -> None:
            from docker.utils import parse_repository_tag

            repository, tag = parse_repository_tag(name)
            for message in client.pull(repository, tag=tag or "latest", stream=True, decode=True):
                if "error" in message:
                    raise ImageError(f"cannot pull image {name!r}: {message['error']}", image=name)
                if time.monotonic() > deadline:  # the caller has left; disconnecting stops the engine too
                    return

        try:
            await self._engine.call(f"pull {name}", job, timeout=timeout, queue="pull")
        except (EngineRefused, EngineUnavailable) as error:
            raise ImageError(f"cannot pull image {name!r}: {error}", image=name) from error
