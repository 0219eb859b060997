"""Asynchronous environments for callers that wait, such as gymnasium's.

Invariant: each call returns when the environment's coroutine has ended. All of them run in the loop of the portal, so
that environments share what belongs to a loop, such as their sandboxes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.envs.portal import portal


class BlockingTextEnv(TextEnv):
    """An ``AsyncTextEnv`` as a ``TextEnv``.

    Args:
        environment: the class, or ``"package.module:Class"``.
        render_mode: one of the class's, or None.
        kwargs: arguments of the class.
    """

    concurrency = "thread"

    def __init__(self, environment: str | type[AsyncTextEnv], *, render_mode: str | None = None, **kwargs: Any) -> None:
        cls: Any = _named(environment) if isinstance(environment, str) else environment
        self.metadata = cls.metadata
        super().__init__(render_mode=render_mode)
        self.env = cls(**kwargs) if render_mode is None else cls(**kwargs, render_mode=render_mode)
        self.instructions, self.max_turns = self.env.instructions, self.env.max_turns
        self.actions_per_turn = self.env.actions_per_turn
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space
        self._closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        return portal().run(self.env.reset(seed=seed, options=options))

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return portal().run(self.env.step(action))

    def expert(self) -> Iterator[str]:
        return self.env.expert()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            portal().run(self.env.close())
        super().close()


def _named(address: str) -> type[AsyncTextEnv]:
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)
