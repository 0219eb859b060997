"""Environments for frameworks that hold the conversation: made on demand, tried again, counted when they fail.

Invariant: an environment belongs to one episode, from ``begin`` to ``end``. A failed one is never used again.
"""

from __future__ import annotations

import dataclasses
import itertools

from agentkit.config import RunConfig, attempts
from agentkit.errors import EnvError, UnexplainedCrash
from agentkit.trainers.rollout.failures import Attempts, FailureBudget
from agentkit.trainers.rollout.hosts import EnvHandle, EnvPool
from agentkit.trainers.rollout.source import EnvSource

_WINDOW = 100
"""Latest episodes whose failures count for ``max_failure_share``."""


class Environments:
    """The environments that a configuration describes. All methods run in the same event loop.

    Args:
        config: the environment, its attempts, and the share of failures that is accepted.

    Raises:
        RegistryError, ConfigError: the environment is unknown or misconfigured.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    def __init__(self, config: RunConfig) -> None:
        source = EnvSource.of(config.env)
        if source.where == "inline":  # it may block, and then nothing else would run in the loop
            source = dataclasses.replace(source, where="thread")
        self.source = source
        self.format_penalty = config.env.format_penalty
        self._attempts = attempts(config)
        self._budget = FailureBudget(config.rollout.max_failure_share, _WINDOW)
        self._pool = EnvPool(source)
        self._held: set[EnvHandle] = set()
        self._closed = False

    async def begin(self, seed: int) -> tuple[EnvHandle, str]:
        """Begin an episode; return its environment and the first observation. Raises ``EnvError``."""
        if self._closed:
            raise RuntimeError("these environments are closed: make new ones")
        left = Attempts(self._attempts)
        for attempt in itertools.count():
            handle = self._pool.acquire(fresh=attempt > 0)
            self._held.add(handle)
            try:
                return handle, await handle.reset(seed)
            except EnvError as error:
                self._release(handle, failed=True)
                if not left.again(error):
                    self._budget.record(error, running=len(self._held))
                    raise
            except BaseException:
                self._release(handle, failed=True)
                raise
        raise AssertionError

    async def end(self, handle: EnvHandle, failure: BaseException | None) -> None:
        """Take an environment back. Raises ``EnvFailureBudgetExceeded``."""
        self._release(handle, failed=failure is not None)
        if failure is None or (isinstance(failure, EnvError) and not isinstance(failure, UnexplainedCrash)):
            self._budget.record(failure, running=len(self._held))

    async def close(self) -> None:
        """Close all environments. Idempotent."""
        self._closed = True
        for handle in tuple(self._held):
            self._release(handle, failed=True)
        await self._pool.close()

    def _release(self, handle: EnvHandle, *, failed: bool) -> None:
        if handle in self._held:
            self._held.discard(handle)
            self._pool.release(handle, failed=failed)
