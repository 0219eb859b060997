"""What an environment is: text in, text out, in gymnasium's terms.

Invariant: an environment knows its game and nothing else. It takes one action a step (never a model's raw answer),
draws only from ``self.np_random``, and tells what it needs from its surroundings by class attributes, so that they can
be read without making an instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from agentkit.envs.spaces import Text

Info = dict[str, Any]
Concurrency = Literal["inline", "thread", "process"]


class EnvDeclaration:
    """What every text environment says about itself, synchronous or not."""

    instructions: str = ""
    """The rules of the game, told to the model once. How an answer is to be formatted is not part of them."""
    max_turns: int = 20
    """Turns after which whoever runs the episode truncates it; the environment itself does not count."""
    actions_per_turn: int = 1
    """Most actions that one answer of a model may hold. Each one is a ``step`` of its own."""
    concurrency: ClassVar[Concurrency] = "process"
    """Where ``reset`` and ``step`` may run. ``inline``: they return within microseconds. ``thread``: they wait, but
    always come back and share no state. ``process``: anything else; a process can be killed when it hangs."""
    deterministic: ClassVar[bool] = True
    """The same seed and the same actions give the same episode, chance included (it is drawn from the seed)."""

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        """The rules for an environment made with these arguments; override where arguments change them."""
        return cls.instructions

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        """``max_turns`` of an environment made with these arguments; override where arguments change it."""
        return cls.max_turns

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str | None:
        """The argument that names the back end of the sandboxes that an environment with these arguments makes itself.

        Such an environment is never put into a sandbox: it holds what nothing inside may see. None: it makes none.
        """
        return None

    @classmethod
    def runs_policy_code(cls, **kwargs: Any) -> bool:
        """Whether an environment with these arguments runs code that the policy wrote.

        If so, a sandbox that fails without an external cause on record, after such code ran, raises
        ``UnexplainedCrash``. By default: whether the environment makes sandboxes itself.
        """
        return cls.own_sandboxes(**kwargs) is not None

    @cached_property
    def observation_space(self) -> Text:
        return Text()

    @cached_property
    def action_space(self) -> Text:
        return Text()

    def expert(self) -> Iterator[str]:
        """Yield actions that solve the task from the current state.

        An expert plans as far as it can be certain: it may be asked for several actions at once, and it ends when the
        task is solved or when what is best next depends on chance that has yet to be seen. Call ``expert()`` again
        after stepping to go on.

        Raises:
            NotImplementedError: this environment has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    @classmethod
    def has_expert(cls) -> bool:
        """Whether ``expert`` is implemented."""
        return cls.expert is not EnvDeclaration.expert


class TextEnv(EnvDeclaration, gymnasium.Env[str, str], ABC):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A gymnasium environment whose observations and actions are texts.

    A subclass implements ``reset`` and ``step`` and starts ``reset`` with ``super().reset(seed=seed)``, which seeds
    ``self.np_random``. ``info`` always holds ``success`` (solved, not merely finished) and ``action_valid`` (the action
    exists), and ``admissible_actions`` where they can be listed. A success ends the episode.
    """

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata.get("render_modes", [])
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"render_mode={render_mode!r} is none of {type(self).__name__}'s modes {list(modes)}")
        self.render_mode = render_mode

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode; the same seed gives the same task. Returns the first observation and info."""
        super().reset(seed=seed)
        return "", {}

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Take one action. Returns observation, reward, terminated, truncated, info."""
        raise NotImplementedError


class AsyncTextEnv(EnvDeclaration, ABC):
    """The same for what waits on a sandbox or a network: ``reset``, ``step`` and ``close`` are coroutines.

    Thousands of these wait in one process, where threads would not scale; ``concurrency`` does not apply to them.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    concurrency: ClassVar[Concurrency] = "inline"
    policy_code_ran: bool = False
    """Set by an environment that runs code of the policy: it has run in the present call. A call that then takes too
    long counts as an ``UnexplainedCrash``; one that only waited for a sandbox does not."""
    render_mode: str | None = None
    _np_random: np.random.Generator | None = None

    @property
    def np_random(self) -> np.random.Generator:
        """The environment's own generator, seeded by ``reset``."""
        if self._np_random is None:
            self._np_random, _ = seeding.np_random()
        return self._np_random

    @abstractmethod
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode; begin with ``await super().reset(seed=seed)``."""
        if seed is not None:
            self._np_random, _ = seeding.np_random(seed)
        return "", {}

    @abstractmethod
    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Take one action. Returns observation, reward, terminated, truncated, info."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything; calling it twice is harmless."""
        return


def expert_actions(env: Any) -> Iterator[str]:
    """The actions of ``env``'s expert, asked again whenever its plan ends. Step ``env`` with each before the next."""
    while True:
        plan = env.expert()
        first = next(plan, None)
        if first is None:
            return
        yield first
        yield from plan
