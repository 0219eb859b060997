"""Environments in worker processes, for the rollout loop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from agentkit import errors
from agentkit.envs.workers.client import ForkServer
from agentkit.envs.workers.worker import Worker
from agentkit.trainers.rollout.contract import TurnResult
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import Places

CLOSE_TIMEOUT = 5.0
"""Seconds that an environment gets for its ``close`` before its process is killed."""
WORKER = "agentkit.trainers.rollout.worker"
"""Module whose fork server starts the processes."""


class ProcessEnv:
    """A synchronous environment in a worker process, reused from episode to episode until something fails."""

    sandboxes: Places = ()

    def __init__(self, source: EnvSource, server: ForkServer) -> None:
        self._source = source
        self._worker = Worker(server, start_timeout=source.reset_timeout)
        self.busy = False

    async def reset(self, seed: int) -> str:
        location = None if self._worker.alive else self._source.importable()
        return await self._call("reset", seed, location, timeout=self._source.reset_timeout)

    async def act(self, actions: Sequence[str]) -> TurnResult:
        timeout = self._source.step_timeout * len(actions)
        return TurnResult(*await self._call("act", tuple(actions), timeout=timeout))

    async def close(self) -> None:
        """Close the environment, or kill its process at once if a call is in progress or was interrupted."""
        if self._worker.alive and not self.busy:
            with contextlib.suppress(errors.EnvError):
                await self._call("close", timeout=CLOSE_TIMEOUT)
        self._worker.kill()

    async def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        self.busy = True
        kind, value = await self._worker.call_async(name, *arguments, timeout=timeout)
        self.busy = False
        if kind != "ok":
            raise getattr(errors, kind, errors.EnvCrashed)(value)
        return value
