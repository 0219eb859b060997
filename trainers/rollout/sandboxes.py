"""Environments of the rollout loop that live in sandboxes, and episodes that are brought back.

Invariant: as for every ``EnvHandle``. Sandboxes come from a pool that keeps a spare one, so that a replacement does not
wait for its making; nothing of sandboxes is imported before an environment is to run in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from agentkit.envs.recovery import Replay
from agentkit.trainers.rollout.contract import TurnResult, check_reset, run_actions_async
from agentkit.trainers.rollout.source import EnvSource

if TYPE_CHECKING:
    from agentkit.envs.house import House


def new_house(source: EnvSource) -> House:
    """Where all environments of a source live. Starts nothing by itself."""
    from agentkit.envs.house import House, Pooled

    assert source.placement is not None
    return House(source.placement, Pooled(source.placement), share=source.share, spread=source.spread)


class SandboxEnv:
    """An environment in a sandbox, which bounds its calls itself."""

    def __init__(self, source: EnvSource, house: House) -> None:
        from agentkit.envs.sandboxed import SandboxedEnv

        self.busy = False
        self._env = SandboxedEnv(
            source.id, house=house, step_timeout=source.step_timeout, reset_timeout=source.reset_timeout
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
    """An environment that is replaced by another one that went the same way, should it die or hang."""

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
