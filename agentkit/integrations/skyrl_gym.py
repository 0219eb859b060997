"""Environments for skyrl-gym 0.4, which SkyRL's generator plays: ``init``, ``step``, ``close``.

Invariant: a failure of the environment is an ``EnvError``, never a reward. An environment goes back when the episode is
over, when SkyRL closes it, or when SkyRL drops it without closing it, as it does after an error of its own.

SkyRL makes one object per episode. Those of a process share their environments: one ``Episodes`` per definition.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from agentkit.errors import ConfigError
from agentkit.integrations.episodes import Episode, Episodes
from agentkit.portal import portal

_shared: dict[str, Episodes] = {}
_lock = threading.Lock()


class AgentkitEnv(BaseTextEnv):
    """An environment of agentkit, for ``skyrl_gym.register``.

    Example:
        >>> skyrl_gym.register(
        ...     id="frozen_lake",
        ...     entry_point="agentkit.integrations.skyrl_gym:AgentkitEnv",
        ...     kwargs={"env": "FrozenLake-v1", "kwargs": {"split": "train"}},
        ... )

    Args:
        env: a registered name.
        end_of_turn: text of the token that ends an answer; SkyRL passes it on with the answer, and it is removed.
        env_config: of SkyRL; not used.
        extras: of SkyRL: the columns of the row. ``extra_info`` has the ``seed`` of the task. ``max_turns`` is
            ``generator.max_turns``; an episode has at most so many answers.
        settings: arguments of ``Episodes``: ``retries``, ``kwargs``, ``max_turns``, ``parser``, ``sandbox``, …

    Raises:
        ConfigError: a setting is wrong or unknown, or the row has no seed.
        RegistryError: the environment is unknown.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    def __init__(
        self,
        *,
        env: str,
        end_of_turn: str = "<|im_end|>",
        env_config: Any = None,
        extras: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        extras = extras or {}
        self._seed = (extras.get("extra_info") or {}).get("seed")
        if self._seed is None:
            raise ConfigError("a row of the dataset has no seed: add extra_info={'seed': …} to each row")
        self._episodes = _episodes(env, settings)
        self._end_of_turn = end_of_turn
        self.max_turns = min(extras.get("max_turns") or self._episodes.max_turns, self._episodes.max_turns)
        self._episode: Episode | None = None

    def init(self, prompt: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Begin the episode; return the first messages. ``prompt`` is not shown: the environment has its own.

        Raises:
            ConfigError: the seed is not an integer of at least 0.
            EnvError: the environment failed in all attempts.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        self.close()
        self.turns = 0
        self._episode = portal().run(self._episodes.begin(self._seed, self.max_turns))
        weakref.finalize(self, _drop, self._episode).atexit = False
        system, first = self._episodes.system, self._episode.observation
        return [{"role": "system", "content": system}, {"role": "user", "content": first}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Carry out an answer of the model.

        Returns:
            The next messages (none at the end), the reward, whether the episode is over, and its metrics so far.

        Raises:
            EnvError: the environment failed: the episode has no result.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        if self._episode is None:
            raise RuntimeError("step was called before init")
        reply = portal().run(self._episode.answer(action.rstrip().removesuffix(self._end_of_turn)))
        self.turns += 1
        return BaseTextEnvStepOutput(
            observations=[] if reply.done else [{"role": "user", "content": reply.text}],
            reward=reply.reward,
            done=reply.done,
            metadata=self.get_metrics(),
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return ``success``, ``turns``, ``invalid_turns`` and what the environment counts; SkyRL averages them."""
        return {} if self._episode is None else self._episode.metrics

    def close(self) -> None:
        """Give the environment back. Idempotent."""
        if self._episode is not None:
            portal().run(self._episode.end())


def _episodes(env: str, settings: Mapping[str, Any]) -> Episodes:
    """Return the shared episodes of a definition."""
    key = json.dumps([env, settings], sort_keys=True, default=str)
    with _lock:
        if key not in _shared:
            _shared[key] = Episodes(env, **settings)
            portal().opened(_shared[key])
        return _shared[key]


def _drop(episode: Episode) -> None:
    """End an episode that SkyRL has dropped, without waiting: this may run in any thread."""
    portal().start(episode.end())
