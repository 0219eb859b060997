"""Register sandboxes for removal by the reaper.

Invariant: the record exists before the sandbox does and is deleted when nothing of the sandbox is left. A back end
whose sandboxes cannot outlive their owner (``Backend.recipe`` is None) needs no record and no reaper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from agentkit.errors import SandboxExpired
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.reaper import process, records
from agentkit.sandboxes.reaper.labels import ID, MANAGED, SPEC, user_labels
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.threads import in_thread


class Registration:
    """The labels and the reaper's record of one sandbox."""

    def __init__(self, id: str, spec: SandboxSpec, backend: Backend) -> None:
        self._id = id
        self._spec = spec
        self._backend = backend
        self._needed = backend.recipe() is not None
        self.labels: Mapping[str, str] = {}

    async def register(self) -> Mapping[str, str]:
        """Create the record; returns all labels that the back end stores with the sandbox."""
        labels = {
            MANAGED: "1",
            ID: self._id,
            SPEC: self._spec.digest,
            **user_labels(self._spec.labels),
        }
        if self._needed:
            # In a thread, since it starts a process; until its end, so that `unregister` cannot overtake it.
            labels |= await finished(in_thread(process.register, self._backend, self._id))
        self.labels = labels
        return labels

    async def watch_backend(self) -> None:
        """Let the reaper remove what this process creates from a sandbox that another process owns."""
        if self._needed:
            await finished(in_thread(process.watch, self._backend))

    async def extend(self, ttl: float | None) -> None:
        """Set the time to live. Raises ``SandboxExpired`` if it has ended already."""
        await self._backend.extend(self._id, ttl)
        if self._needed:
            await finished(in_thread(records.extend, self._id, ttl))

    async def expire(self) -> bool:
        """End the time to live now: the reaper then tries to remove the sandbox until it succeeds.

        Returns:
            Whether a reaper does this.
        """
        if self._needed:
            with contextlib.suppress(SandboxExpired, OSError):
                await finished(in_thread(records.extend, self._id, 0.0))
        return self._needed

    async def unregister(self) -> None:
        """Delete the record: nothing of the sandbox is left."""
        if self._needed:
            await finished(in_thread(records.forget, self._id))
