"""An asynchronous environment behind the synchronous API.

Invariant: every call runs to its end on one event loop that belongs to the adapter and is closed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from agentkit.envs.base import AsyncTextEnv, Info, TextEnv


class Blocking(TextEnv):
    """Drive an ``AsyncTextEnv`` like a ``TextEnv``: to check it, or to play it by hand. Not for use inside a loop."""

    def __init__(self, env: AsyncTextEnv) -> None:
        self.env = env
        self.metadata = dict(env.metadata)
        self.render_mode = env.render_mode
        self.instructions, self.max_turns = env.instructions, env.max_turns
        self.actions_per_turn = env.actions_per_turn
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._loop = asyncio.new_event_loop()

    @property
    def _np_random(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Where gymnasium, its checker included, looks for the generator.
        return self.env.np_random

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return self._loop.run_until_complete(self.env.reset(seed=seed, options=options))

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return self._loop.run_until_complete(self.env.step(action))

    def expert(self) -> Iterator[str]:
        return self.env.expert()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self.env.close())
            self._loop.run_until_complete(self.env.close())  # closing twice is part of the contract
            self._loop.close()
