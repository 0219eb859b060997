"""A synchronous wrapper for asynchronous environments."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.portal import portal


class SyncTextEnv(TextEnv):
    """An ``AsyncTextEnv`` as a ``TextEnv``, for gymnasium, for checks and to play by hand.

    All coroutines run in the background event loop of this process, so that environments can share what belongs to a
    loop, such as sandboxes. Do not call it from that loop.

    Args:
        env: the environment.
    """

    concurrency = "thread"

    def __init__(self, env: AsyncTextEnv) -> None:
        self.env = env
        self.metadata = dict(env.metadata)
        self.render_mode = env.render_mode
        self.instructions, self.max_turns = env.instructions, env.max_turns
        self.actions_per_turn, self.tools = env.actions_per_turn, env.tools
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._closed = False

    @property
    def _np_random(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        # gymnasium and its checker read this attribute.
        return self.env.np_random

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        return portal().run(self.env.reset(seed=seed, options=options))

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return portal().run(self.env.step(action))

    def expert(self) -> Iterator[str]:
        return self.env.expert()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            portal().run(self.env.close())


def make_sync(environment: str | type[AsyncTextEnv], *, render_mode: str | None = None, **kwargs: Any) -> SyncTextEnv:
    """Make an asynchronous environment for gymnasium.

    Args:
        environment: the class, or ``"package.module:Class"``.
        render_mode: passed to the class if given.
        kwargs: arguments of the class.

    Raises:
        ValueError: the class has no such ``render_mode``.
    """
    cls: Any = environment
    if isinstance(environment, str):
        module, _, name = environment.partition(":")
        cls = getattr(importlib.import_module(module), name)
    modes = cls.metadata.get("render_modes", [])
    if render_mode is not None and render_mode not in modes:
        raise ValueError(f"render_mode={render_mode!r} is not one of {cls.__name__}'s modes {list(modes)}")
    return SyncTextEnv(cls(**kwargs) if render_mode is None else cls(**kwargs, render_mode=render_mode))
