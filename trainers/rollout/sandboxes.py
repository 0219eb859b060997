"""Environments of the rollout loop that run in sandboxes, and episodes that are replayed after a failure.

The modules that create sandboxes are imported only when an environment runs in a sandbox.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentkit.envs.isolation.replay import SupervisedEnv
from agentkit.sandboxes.recovery.record import Means, RecoveryLog
from agentkit.trainers.rollout.contract import TurnResult, check_reset, run_actions_async
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import Places

if TYPE_CHECKING:
    from agentkit.envs.isolation.allocator import SandboxAllocator


def new_allocator(source: EnvSource, log: RecoveryLog) -> SandboxAllocator:
    """Return the allocator of the sandboxes of all environments of a source. Starts nothing."""
    from agentkit.envs.isolation.allocator import SandboxAllocator

    assert source.placement is not None
    return SandboxAllocator(source.placement, source.redundancy, make_timeout=source.reset_timeout, log=log)


class SandboxEnv:
    """An environment in a sandbox, with bounded calls."""

    def __init__(self, source: EnvSource, allocator: SandboxAllocator) -> None:
        from agentkit.envs.isolation.env import SandboxedEnv

        self.busy = False
        self._env = SandboxedEnv(
            source.id, allocator=allocator, step_timeout=source.step_timeout, reset_timeout=source.reset_timeout
        )

    @property
    def sandboxes(self) -> Places:
        return tuple(self._env.places)

    async def reset(self, seed: int) -> str:
        self.busy = True
        observation = check_reset(await self._env.reset(seed=seed))
        self.busy = False
        return observation

    async def act(self, actions: Sequence[str]) -> TurnResult:
        self.busy = True
        result = await run_actions_async(self._env, actions)
        self.busy = False
        return result

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self._env.close()


class ReplayedEnv:
    """An environment outside of sandboxes that continues in a fresh one, by replaying its episode, if it fails.

    Args:
        make: makes a handle of an environment.
        dispose: closes a handle in the background.
        log: where recoveries are recorded.
    """

    sandboxes: Places = ()

    def __init__(self, make: Callable[[], Any], dispose: Callable[[Any], None], log: RecoveryLog) -> None:
        self._env = _SupervisedHandle(make, dispose, log)

    @property
    def busy(self) -> bool:
        return self._env.target is not None and self._env.target.handle.busy

    async def reset(self, seed: int) -> str:
        await self._env.begin()
        return await self._env.act("reset", lambda target: target.handle.reset(seed))

    async def act(self, actions: Sequence[str]) -> TurnResult:
        return await self._env.act("step", lambda target: target.handle.act(actions))

    async def close(self) -> None:
        await self._env.stop()


class _ReplaceableHandle:
    """A handle that ``Supervised`` can replace. Only its calls detect failures."""

    host = socket.gethostname()
    sandbox_id = failure = ""

    def __init__(self, handle: Any, dispose: Callable[[Any], None]) -> None:
        self.handle = handle
        self._dispose: Callable[[Any], None] | None = dispose

    def on_failure(self, callback: Callable[[str], None]) -> None:
        return

    def release(self, *, discard: bool = False) -> None:
        dispose, self._dispose = self._dispose, None
        if dispose is not None:
            dispose(self.handle)


class _SupervisedHandle(SupervisedEnv[_ReplaceableHandle]):
    def __init__(self, make: Callable[[], Any], dispose: Callable[[Any], None], log: RecoveryLog) -> None:
        super().__init__(replays=True, log=log)
        self._make, self._dispose = make, dispose

    async def acquire(self, apart: Sequence[_ReplaceableHandle]) -> tuple[_ReplaceableHandle, Means]:
        return _ReplaceableHandle(self._make(), self._dispose), "new"
