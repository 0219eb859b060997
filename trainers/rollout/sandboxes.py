"""Environments of the rollout loop that run in sandboxes, and episodes that are replayed after a failure.

Sandboxes come from a pool with a spare one, so that a failed sandbox is replaced at once. The sandbox modules are
imported only when an environment runs in a sandbox.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentkit.envs.isolation.replay import Replay
from agentkit.trainers.rollout.contract import TurnResult, check_reset, run_actions_async
from agentkit.trainers.rollout.source import EnvSource

if TYPE_CHECKING:
    from agentkit.envs.isolation.allocator import SandboxAllocator


def new_allocator(source: EnvSource) -> SandboxAllocator:
    """Return the allocator of the sandboxes of all environments of a source. Starts nothing."""
    from agentkit.envs.isolation.allocator import PooledSandboxes, SandboxAllocator

    assert source.placement is not None
    redundancy = source.redundancy
    return SandboxAllocator(
        source.placement, PooledSandboxes(source.placement), share=redundancy.share, spread=redundancy.spread
    )


class SandboxEnv:
    """An environment in a sandbox, with bounded calls."""

    def __init__(self, source: EnvSource, allocator: SandboxAllocator) -> None:
        from agentkit.envs.isolation.env import SandboxedEnv

        self.busy = False
        self._env = SandboxedEnv(
            source.id, allocator=allocator, step_timeout=source.step_timeout, reset_timeout=source.reset_timeout
        )

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
    """An environment that continues in a fresh one, by replaying its episode, if it crashes or hangs."""

    def __init__(self, make: Callable[[], Any], on_replay: Callable[[], None]) -> None:
        self._make, self._on_replay = make, on_replay
        self._replay: Replay[Any] = Replay(make(), self._renew)

    @property
    def busy(self) -> bool:
        return self._replay.env.busy

    async def reset(self, seed: int) -> str:
        self._replay.begin()
        return await self._replay.do(lambda env: env.reset(seed))

    async def act(self, actions: Sequence[str]) -> TurnResult:
        return await self._replay.do(lambda env: env.act(actions))

    async def close(self) -> None:
        await self._replay.env.close()

    async def _renew(self, old: Any) -> Any:
        self._on_replay()
        await old.close()
        return self._make()
