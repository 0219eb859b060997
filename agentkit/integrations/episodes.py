"""Episodes whose conversation another framework holds: texts for its model out, the model's answers in.

Invariant: an answer has the same effect and cost as in ``agentkit run``. A failure of the environment is an
``EnvError``, never a reward, and the environment goes back at the end of the episode, also after a failure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from agentkit.config_io import load_config
from agentkit.errors import ConfigError
from agentkit.integrations.environments import Environments
from agentkit.tool_calls import FORMATS
from agentkit.trainers.rollout.counters import TASK
from agentkit.trainers.rollout.episode import act, system_message
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.plugin import make_parser
from agentkit.trainers.rollout.tools import ToolUse
from agentkit.types import Trajectory, Turn


class Reply(NamedTuple):
    """What an answer led to."""

    text: str
    """The next message to the model."""
    reward: float
    """The environment's rewards, with the penalty for an invalid answer."""
    done: bool
    """The episode is over."""


class Episodes:
    """Makes episodes of one environment, and keeps the environments for later ones.

    Tools are listed in the system message; the model writes its call as ``<tool_call>{…}</tool_call>``.

    Args:
        env: a registered name.
        retries: further attempts to begin an episode if the environment fails. A failure after its begin ends it,
            unless ``recovery`` continues it.
        max_failure_share: share of failing environments, among the latest 100 episodes, that raises an error.
        env_settings: other settings of the section ``env`` of a run: ``kwargs``, ``max_turns``, ``parser``,
            ``step_timeout``, ``sandbox``, ``standbys``, …

    Raises:
        ConfigError: an argument is wrong or unknown.
        RegistryError: the environment is unknown.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    def __init__(self, env: str, *, retries: int = 2, max_failure_share: float = 0.5, **env_settings: Any) -> None:
        rollout = {"retries": retries, "max_failure_share": max_failure_share}
        config = load_config({"env": {"id": env, **env_settings}, "rollout": rollout})
        self._environments = Environments(config)
        source = self._environments.source
        tools = ToolUse(source.tools, FORMATS["hermes"], native=False, listed=False) if source.tools else None
        self._parser = make_parser(config, source.actions_per_turn, tools)
        self.max_turns = source.max_turns
        """Answers after which an episode is over."""
        self.system = system_message(source.instructions, self._parser)
        """The system message: the rules of the environment and the format of answers."""

    async def begin(self, seed: Any, max_turns: int | None = None) -> Episode:
        """Begin the episode of a task.

        Args:
            seed: the task, an integer of at least 0.
            max_turns: answers after which the episode is over, if they are fewer than those of the environment.

        Raises:
            ConfigError: ``seed`` is no seed.
            EnvError: the environment failed in all attempts.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ConfigError(f"the seed {seed!r:.200} of a task must be an integer of at least 0")
        limit = self.max_turns if max_turns is None else min(max_turns, self.max_turns)
        handle, observation = await self._environments.begin(int(seed))
        trajectory = Trajectory(0, 0, self._environments.source.id, int(seed), 0)
        return Episode(self._environments, self._parser, handle, trajectory, observation, limit)

    async def close(self) -> None:
        """Close all environments, also those of running episodes. Idempotent."""
        await self._environments.close()


class Episode:
    """One episode; ``Episodes.begin`` makes it."""

    def __init__(
        self,
        environments: Environments,
        parser: Any,
        handle: EnvHandle,
        trajectory: Trajectory,
        observation: str,
        max_turns: int,
    ) -> None:
        self.observation = observation
        """The latest observation; before any answer it is the first message of the user."""
        self._environments, self._parser = environments, parser
        self._handle: EnvHandle | None = handle
        self._trajectory, self._max_turns = trajectory, max_turns

    @property
    def reward(self) -> float:
        """The sum of the rewards so far."""
        return self._trajectory.reward

    @property
    def metrics(self) -> dict[str, float]:
        """``success``, ``turns``, ``invalid_turns``, and what the environment counts."""
        turns = self._trajectory.turns
        counted = {name.removeprefix(TASK): value for name, value in self._trajectory.metrics.items()}
        invalid = float(sum(not turn.valid for turn in turns))
        own = {"success": float(self._trajectory.success), "turns": float(len(turns)), "invalid_turns": invalid}
        return {**counted, **own}

    async def answer(self, text: str) -> Reply:
        """Carry out an answer of the model. The environment goes back if this ends the episode.

        Raises:
            EnvError: the environment failed: the episode has no result.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
            RuntimeError: the episode is over.
        """
        if self._handle is None:
            raise RuntimeError("the episode is over: it takes no further answers")
        answer = self._parser.parse(text)
        turn = Turn(_NO_IDS, _NO_IDS, _NO_LOGPROBS, (), response=text, actions=answer.actions, valid=answer.valid)
        try:
            step = await act(
                self._handle, self._trajectory, turn, self.observation, self._parser, self._environments.format_penalty
            )
        except BaseException as error:
            await self._end(error)
            raise
        self._trajectory.turns.append(turn)
        self.observation = step.observation
        done = step.terminated or step.truncated or len(self._trajectory.turns) >= self._max_turns
        if done:
            await self._end(None)
        return Reply(step.shown, turn.reward, done)

    async def end(self) -> None:
        """Give the environment back before the episode is over. Idempotent."""
        await self._end(None)

    async def _end(self, error: BaseException | None) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            await self._environments.end(handle, error)


_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
