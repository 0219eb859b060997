"""Images of a sandbox server: fetched ahead, and removed when they are no longer used.

Invariant: only images that this server fetched itself are removed, and never one that is listed, that a sandbox uses or
that a snapshot needs.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from agentkit.errors import SandboxError
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.server.config import ImageConfig
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.spec import SandboxSpec

_log = logging.getLogger(__name__)

_DAY = 86400.0


def unused(
    fetched: Mapping[str, float], in_use: Collection[str], config: ImageConfig, now: float, disk: float
) -> list[str]:
    """Return the images to remove, the one that was used longest ago first.

    Args:
        fetched: when each image that the server fetched was last used.
        in_use: images of sandboxes.
        config: which images are listed, and how long others are kept.
        now: the time.
        disk: share of the disk in use.
    """
    kept = (*config.pull, *config.keep)
    free = sorted(
        (used, name)
        for name, used in fetched.items()
        if name not in in_use and not any(fnmatch.fnmatchcase(name, pattern) for pattern in kept)
    )
    full = config.max_disk is not None and disk >= config.max_disk
    limit = float("-inf") if config.keep_days is None else now - config.keep_days * _DAY
    return [name for used, name in free if full or used <= limit]


class ImageCache:
    """The images of one server.

    Attributes:
        config: the images to fetch ahead, and how long others are kept.
        counts: numbers of images that were ``fetched``, that ``failed`` to be fetched, and that were ``removed``.
    """

    def __init__(
        self,
        backend: Backend,
        host: Host,
        config: ImageConfig,
        in_use: Callable[[], set[str]],
        fetched: Mapping[str, float],
        save: Callable[[Mapping[str, float]], None],
    ) -> None:
        """Do nothing yet.

        Args:
            backend: has the images.
            host: the machine of the server.
            config: see ``config``.
            in_use: returns the names and ids of the images that sandboxes and snapshots use.
            fetched: when each image that earlier processes of the server fetched was last used.
            save: keeps ``fetched`` for the next process.
        """
        self.config = config
        self.counts: Counter[Literal["fetched", "failed", "removed"]] = Counter()
        self._backend = backend
        self._host = host
        self._in_use = in_use
        self._fetched = dict(fetched)
        self._save = save
        self._present: set[str] = set()
        self._removal = asyncio.Lock()

    @property
    def num_fetched(self) -> int:
        """Number of images that this server has fetched and not removed."""
        return len(self._fetched)

    async def use(self, spec: SandboxSpec) -> None:
        """Fetch the image of a sandbox that is about to be created. Raises ``ImageError``."""
        if spec.pull != "never" and spec.image not in self._present:
            await self.fetch(spec.image, spec.pull_timeout)
        if spec.image in self._fetched:
            self._fetched[spec.image] = time.time()

    async def fetch(self, name: str, timeout: float, *, refresh: bool = False) -> bool:
        """Fetch an image; return whether it was missing. Raises ``ImageError``."""
        async with self._removal:
            pass
        try:
            missing = await self._backend.pull(name, timeout=timeout, refresh=refresh)
        except SandboxError:
            self.counts["failed"] += 1
            raise
        self._present.add(name)
        if missing:
            self.counts["fetched"] += 1
            self._fetched[name] = time.time()
            self._save(self._fetched)
        return missing

    async def maintain(self) -> None:
        """Fetch the listed images and remove unused ones, now and regularly, until cancelled."""
        while True:
            for name in self.config.pull:
                try:
                    await self.fetch(name, self.config.pull_timeout, refresh=True)
                except SandboxError as error:
                    _log.warning("cannot fetch a listed image: %s", error)
            await self.remove_unused()
            await asyncio.sleep(self.config.interval)

    async def remove_unused(self) -> None:
        """Remove the images that ``unused`` returns; above ``max_disk``, only until the disk is below it."""
        for name in self._in_use() & self._fetched.keys():
            self._fetched[name] = time.time()
        for name in self._unused():
            self._host.update()
            if name not in self._unused():
                continue
            async with self._removal:
                self._present.discard(name)
                try:
                    if not await self._backend.remove_image(name, self._in_use()):
                        continue
                except SandboxError as error:
                    _log.warning("cannot remove the unused image %s: %s", name, error)
                    continue
                del self._fetched[name]
                self.counts["removed"] += 1
                _log.info("removed the image %s, which no sandbox uses", name)
        self._save(self._fetched)

    def _unused(self) -> list[str]:
        return unused(self._fetched, self._in_use(), self.config, time.time(), self._host.usage.disk)
