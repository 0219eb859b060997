"""TRL: environments for ``GRPOTrainer``, as ``environment_factory`` and as ``rollout_func``.

``EnvironmentFactory`` gives TRL's own loop an environment whose methods are tools. ``RolloutFunc`` plays the episodes
instead of that loop. TRL itself is imported only to generate.

Invariant: an episode whose environment failed has the reward None, which TRL leaves out of baselines and losses. No
environment outlives its episode in the hands of TRL, which pools instances and never closes them: an instance holds an
environment from ``reset`` to ``get_reward`` only.
"""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from typing import Any

from agentkit.config_io import load_config
from agentkit.errors import ConfigError, EnvError, EnvFailureBudgetExceeded
from agentkit.integrations.environments import Environments
from agentkit.integrations.trl_rollout import RolloutFunc as RolloutFunc
from agentkit.integrations.trl_rollout import episode_reward as episode_reward
from agentkit.integrations.trl_tools import docstring, tool_method
from agentkit.portal import portal
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.source import EnvSource

_OVER = "The episode is over."
_FAILED = "The environment failed. This episode does not count."


class EnvironmentFactory:
    """The argument ``environment_factory`` of TRL's trainers.

    An environment with tools has one method for each tool. Another one has the method ``step``, which takes an action
    and has the instructions as its docstring. Each row of the data set has a ``seed``, which selects the task.

    Example:
        >>> trainer = GRPOTrainer(
        ...     model, args=GRPOConfig(max_tool_calling_iterations=20),
        ...     train_dataset=Dataset.from_dict({"seed": range(1000)}),
        ...     environment_factory=EnvironmentFactory("FrozenLake-v1", sandbox="docker"),
        ... )

    Args:
        env: a registered name.
        retries: further attempts to begin an episode if the environment fails. TRL cannot repeat an episode, so a
            failure after its begin voids it, unless ``recovery`` continues it.
        max_failure_share: share of failing environments, among the latest 100 episodes, that raises an error.
        env_settings: other settings of the section ``env`` of a run: ``kwargs``, ``max_turns``, ``step_timeout``,
            ``sandbox``, ``standbys``, …

    Raises:
        ConfigError: an argument is wrong or unknown, or a tool has a name that Python does not allow.
        RegistryError: the environment is unknown.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    def __init__(self, env: str, *, retries: int = 2, max_failure_share: float = 0.5, **env_settings: Any) -> None:
        for name in ("parser", "parser_options"):
            if name in env_settings:
                raise ConfigError(f"{name} has no effect here, because actions are tool calls: leave it out")
        self._arguments = {"retries": retries, "max_failure_share": max_failure_share, **env_settings}
        config = load_config(
            {
                "env": {"id": env, **env_settings},
                "rollout": {"retries": retries, "max_failure_share": max_failure_share},
            }
        )
        self._environments = Environments(config)
        source = self._environments.source
        self._class = type(source.id, (_Episode,), _methods(source))
        self._portal = portal()
        self._portal.opened(self._environments)
        weakref.finalize(self, _dispose, self._portal, self._environments).atexit = False

    def __call__(self) -> Any:
        """Return an object that plays one episode at a time. Starts nothing."""
        return self._class(self)

    def __reduce__(self) -> Any:  # another process makes its own environments
        return functools.partial(EnvironmentFactory, self._environments.source.id, **self._arguments), ()

    def close(self) -> None:
        """Close all environments. Otherwise this happens when the factory is collected, or the interpreter exits."""
        self._portal.run(self._environments.close())
        self._portal.closed(self._environments)


class _Episode:
    """An object of TRL's pool. TRL calls ``reset``, the methods of a subclass, and ``get_reward``."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory  # keeps the environments open
        self._environments = factory._environments
        self._handle: EnvHandle | None = None
        self._return = 0.0
        self._steps = 0
        self._over = True
        self._failure: Exception | None = None

    def reset(self, **row: Any) -> str:
        """Begin the episode of the row's ``seed``; return the text that TRL appends to the prompt.

        Raises:
            ConfigError: the row has no valid seed.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        seed = row.get("seed")
        if type(seed) is not int or seed < 0:
            raise ConfigError(
                f"the row {str(row)!r:.200} has no seed: the data set needs a column 'seed' with integers of at least 0"
            )
        self._end()
        self._return, self._steps, self._over, self._failure = 0.0, 0, False, None
        source = self._environments.source
        try:
            self._handle, observation = portal().run(self._environments.begin(seed))
        except EnvError as error:
            self._over, self._failure = True, error
            if isinstance(error, EnvFailureBudgetExceeded):
                raise
            return _FAILED
        text = f"{source.instructions.strip()}\n\n{observation}" if source.tools else observation
        messages = row.get("prompt")
        asked = messages[-1].get("content") if isinstance(messages, list) and messages else messages
        return f"\n\n{text}" if asked else text

    @property
    def voided(self) -> bool:
        """Whether the environment of the latest episode failed, for reward functions; they get ``environments``."""
        return self._failure is not None

    def get_reward(self) -> float | None:
        """End the episode and return its reward; None if the environment failed.

        Raises:
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        self._end()
        return None if self.voided else self._return

    def _take(self, action: str) -> str:
        """Take an action; return the text for the model."""
        if self._failure or self._handle is None:
            return _FAILED if self._failure else _OVER
        if self._over:
            return _OVER
        source = self._environments.source
        try:
            result = portal().run(self._handle.act((action,)))
        except Exception as error:  # TRL would show it to the model; `_end` handles it
            self._failure = error
            return _FAILED
        self._steps += 1
        self._return += result.reward + (0.0 if result.valid else self._environments.format_penalty)
        limit = source.max_turns * source.actions_per_turn
        self._over = result.terminated or result.truncated or self._steps >= limit
        return f"{result.observation}\n{_OVER}" if self._over else result.observation

    def _end(self) -> None:
        """Give the environment back. Idempotent. Raises what is not a failure of an environment."""
        handle, self._handle, self._over = self._handle, None, True
        if handle is None:
            return
        portal().run(self._environments.end(handle, self._failure))
        if self._failure is not None and not isinstance(self._failure, EnvError):
            raise self._failure


def _methods(source: EnvSource) -> dict[str, Any]:
    """Return the methods of an environment that TRL offers to the model."""
    if source.tools:
        return {tool["function"]["name"]: tool_method(tool, _Episode._take) for tool in source.tools}

    def step(self: _Episode, action: Any = None, **others: Any) -> str:  # the environment judges wrong arguments
        if isinstance(action, str) and not others:
            return self._take(action)
        return self._take(json.dumps({"action": action, **others} if others else action))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    step.__annotations__ = {"action": str, "return": str}  # transformers reads all annotations as arguments
    step.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter("self", kind), inspect.Parameter("action", kind, annotation=str)], return_annotation=str
    )
    step.__doc__ = docstring(source.instructions.strip() or "Take one action.", {"action": "One action."})
    return {"step": step}


def _dispose(owner: Any, environments: Environments) -> None:
    """Close the environments of a factory that was collected, without waiting: this may run in any thread."""
    owner.closed(environments)
    owner.start(environments.close())
