"""Base classes of text environments, in gymnasium's terms.

Invariant: an environment contains only its task. It takes one action per step (never the raw answer of a model), draws
only from ``self.np_random``, and declares its requirements as class attributes, which can be read without an instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.utils import seeding

from agentkit.envs.spaces import Text
from agentkit.tool_calls import Tool

Info = dict[str, Any]
Concurrency = Literal["inline", "thread", "process"]


class EnvDeclaration:
    """Declarations of a text environment, common to synchronous and asynchronous ones."""

    instructions: str = ""
    """The rules of the task, shown to the model once. They do not include the format of an answer."""
    max_turns: int = 20
    """Turns after which the caller truncates an episode; the environment does not count them."""
    actions_per_turn: int = 1
    """Most actions in one answer of a model. Each action is one ``step``."""
    tools: Sequence[Tool] = ()
    """Tools that the model calls, as chat APIs describe functions. An action is then a call as JSON,
    ``{"name": …, "arguments": {…}}``, which ``agentkit.call_of`` reads."""
    concurrency: ClassVar[Concurrency] = "process"
    """Where ``reset`` and ``step`` may run. ``inline``: in the event loop; they return within microseconds.
    ``thread``: they wait, but always return, and share no state. ``process``: in a process, which can be killed if it
    hangs."""
    deterministic: ClassVar[bool] = True
    """Whether the same seed and actions give the same episode; chance is drawn from the seed."""

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        """Return ``instructions`` for an environment with these arguments. Override it if they depend on arguments."""
        return cls.instructions

    @classmethod
    def tools_for(cls, **kwargs: Any) -> Sequence[Tool]:
        """Return ``tools`` for an environment with these arguments. Override it if they depend on arguments."""
        return cls.tools

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        """Return ``max_turns`` for an environment with these arguments. Override it if it depends on arguments."""
        return cls.max_turns

    @classmethod
    def options_for(cls, **kwargs: Any) -> Mapping[str, Any] | None:
        """Return the arguments that ``**kwargs`` of the constructor takes, with their values; None if it takes any.

        Raises:
            ConfigError: an argument does not exist, or has a wrong value.
        """
        return None

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str | None:
        """Return the name of the argument for the back end of sandboxes that the environment creates itself, or None.

        Such an environment is never put into a sandbox, because it holds secrets of the task. If it also has an
        argument ``redundancy``, it gets the ``Redundancy`` that ``agentkit.make`` or the run has for its sandboxes.
        """
        return None

    @classmethod
    def runs_policy_code(cls, **kwargs: Any) -> bool:
        """Return whether an environment with these arguments runs code that the policy wrote.

        If a sandbox fails after such code ran, and no external cause is recorded, ``UnexplainedCrash`` is raised. By
        default, True if the environment creates sandboxes itself.
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

        The plan ends when the task is solved, or when the best next action depends on chance that was not drawn yet.
        Call ``expert()`` again after stepping to continue.

        Raises:
            NotImplementedError: the environment has no expert.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    @classmethod
    def has_expert(cls) -> bool:
        """Return whether ``expert`` is implemented."""
        return cls.expert is not EnvDeclaration.expert


class TextEnv(EnvDeclaration, gymnasium.Env[str, str], ABC):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A gymnasium environment whose observations and actions are texts.

    A subclass implements ``reset`` and ``step``; ``reset`` starts with ``super().reset(seed=seed)``, which seeds
    ``self.np_random``. ``info`` contains ``success`` (solved, not only finished), ``action_valid`` (the action exists),
    and ``admissible_actions`` if they can be listed. A success ends the episode.

    Args:
        render_mode: one of ``metadata["render_modes"]``, or None.
    """

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata.get("render_modes", [])
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"render_mode={render_mode!r} is not one of {type(self).__name__}'s modes {list(modes)}")
        self.render_mode = render_mode

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode. The same seed gives the same task.

        Args:
            seed: seeds ``np_random``; None continues with the current generator.
            options: specific to the environment.

        Returns:
            The first observation, and info.
        """
        super().reset(seed=seed)
        return "", {}

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Take one action. Return observation, reward, terminated, truncated and info."""
        raise NotImplementedError


class AsyncTextEnv(EnvDeclaration, ABC):
    """A text environment that waits for a sandbox or a network: ``reset``, ``step`` and ``close`` are coroutines.

    Thousands of them can wait in one process. ``concurrency`` does not apply to them.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    concurrency: ClassVar[Concurrency] = "inline"
    policy_code_ran: bool = False
    """Set by an environment when code of the policy has run in the current call. If that call then times out, it is an
    ``UnexplainedCrash``; a call that only waited for a sandbox is an ``EnvTimeout``."""
    render_mode: str | None = None
    _np_random: np.random.Generator | None = None

    @property
    def np_random(self) -> np.random.Generator:
        """The random generator of the environment, seeded by ``reset``."""
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
        """Take one action. Return observation, reward, terminated, truncated and info."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release all resources. Idempotent."""
        return


def expert_actions(env: Any) -> Iterator[str]:
    """Yield the expert's actions, planning again when a plan ends. Step ``env`` with each action before the next."""
    while True:
        plan = env.expert()
        first = next(plan, None)
        if first is None:
            return
        yield first
        yield from plan
