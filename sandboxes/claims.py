"""The marks by which a sandbox is found again and removed should its owner die.

Invariant: the marks exist before the sandbox does and go when nothing of it is left. Where a sandbox cannot outlive
its owner (``Backend.recipe`` is None), none are needed and no file, process or thread is made for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from agentkit.errors import LeaseExpired
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec

ORIGIN = "agentkit.origin"
"""Label of a sandbox: the snapshot that it was made from, which must outlive it."""


class Claim:
    """The marks of one sandbox."""

    def __init__(self, id: str, spec: SandboxSpec, backend: Backend) -> None:
        self._id = id
        self._spec = spec
        self._backend = backend
        self._needed = backend.recipe() is not None
        self.labels: Mapping[str, str] = {}

    @staticmethod
    def user_labels(labels: Mapping[str, str]) -> dict[str, str]:
        """Labels of a specification as back ends keep them."""
        return {f"agentkit.user.{name}": value for name, value in labels.items()}

    async def make(self) -> Mapping[str, str]:
        """Mark it; returns all labels that the back end is to keep with it."""
        labels = {
            "agentkit.managed": "1",
            "agentkit.id": self._id,
            "agentkit.spec": self._spec.digest,
            **self.user_labels(self._spec.labels),
        }
        if self._needed:
            from agentkit.sandboxes import reaper

            # In a thread, since it starts a process; to its end, since drop() must not overtake it.
            labels |= await finished(asyncio.to_thread(reaper.claim, self._backend, self._id, None))
        self.labels = labels
        return labels

    async def watch(self) -> None:
        """Have what this process makes of it removed should this process die, though the sandbox is another's."""
        if self._needed:
            from agentkit.sandboxes import reaper

            await finished(asyncio.to_thread(reaper.watch, self._backend))

    async def live(self) -> None:
        """Its time to live begins: only now, lest it end while a large image is pulled."""
        if self._spec.ttl is not None:
            await self.extend(self._spec.ttl)

    async def extend(self, ttl: float | None) -> None:
        """Raises ``LeaseExpired`` if the time has ended already."""
        await self._backend.extend(self._id, ttl)
        if self._needed:
            from agentkit.sandboxes import records

            await finished(asyncio.to_thread(records.extend, self._id, ttl))

    async def abandon(self) -> bool:
        """End its time now, so that the reaper tries to remove it until nothing of it is left.

        Returns:
            Whether there is a reaper that does.
        """
        if self._needed:
            from agentkit.sandboxes import records

            with contextlib.suppress(LeaseExpired, OSError):
                await finished(asyncio.to_thread(records.extend, self._id, 0.0))
        return self._needed

    async def drop(self) -> None:
        """Nothing of the sandbox is left."""
        if self._needed:
            from agentkit.sandboxes import records

            await finished(asyncio.to_thread(records.forget, self._id))
