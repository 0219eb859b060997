"""Worker process that plays one environment of gymnasium.

Invariant: a reset seeds the global generators of ``random`` and ``numpy`` as well, so that environments that draw from
them repeat their episodes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from agentkit.entry_points import nearest
from agentkit.envs.workers.fork_server import Handler
from agentkit.errors import ConfigError
from agentkit.integrations.gymnasium_text import (
    check_readable,
    name_actions,
    parse,
    prompt,
    rules,
    samples,
    shown,
    uncoloured,
)
from agentkit.integrations.library import serve


class Player:
    """Answers the calls of one ``GymnasiumEnv``."""

    def __init__(self) -> None:
        self._env: gymnasium.Env[Any, Any] | None = None
        self._names: list[str] | None = None

    def describe(self, id: str, options: dict[str, Any], names: list[str] | None) -> dict[str, Any]:
        """Return what ``GymnasiumEnv`` tells about itself.

        Raises:
            ConfigError: the environment cannot be made with these options, or has no text form.
        """
        spec = _spec(id)
        accepted = _accepted(spec)
        for name in options:
            if accepted is not None and name not in accepted:
                raise ConfigError(f"gymnasium:{id} takes no argument {name!r}; {nearest(name, list(accepted))}")
        try:
            env = _make(id, options, ansi=False)
        except Exception as error:
            given = f" with {options}" if options else ""
            raise ConfigError(f"gymnasium cannot make {id}{given}: {type(error).__name__}: {error}") from error
        ansi = "ansi" in (env.metadata.get("render_modes") or ())
        if not ansi:
            check_readable(id, env.observation_space)
        documented = inspect.getdoc(env.unwrapped) or ""
        names = name_actions(id, env, documented, names)
        made = env.spec or spec
        return {
            "options": accepted,
            "ansi": ansi,
            "names": names,
            "action": prompt(id, env.action_space, names),
            "examples": samples(env.action_space, names),
            "rules": rules(documented, observation=not ansi),
            "max_steps": max(made.max_episode_steps or 0, 0),  # -1 removes the limit
            "threshold": made.reward_threshold,
        }

    def reset(
        self,
        id: str,
        options: dict[str, Any],
        names: list[str] | None,
        ansi: bool,
        seed: int,
        chosen: dict[str, Any] | None,
    ) -> str:
        """Start an episode; return the observation as text."""
        if self._env is None:
            self._env, self._names = _make(id, options, ansi=ansi), names
        random.seed(seed)
        np.random.seed(seed % 2**32)
        observation, _ = self._env.reset(seed=seed, options=chosen)
        return self._observed(self._env, observation)

    def step(self, text: str) -> tuple[str, float, bool, bool, bool | None] | None:
        """Take an action.

        Returns:
            Observation, reward, terminated, truncated, and whether the environment says that it is solved (None if it
            does not say); None if there is no such action.
        """
        env = self._env
        assert env is not None, "reset comes first"
        action = parse(env.action_space, self._names, text)
        if action is None:
            return None
        observation, reward, terminated, truncated, info = env.step(action)
        said = info.get("success", info.get("is_success"))
        success = None if said is None else bool(said)
        return self._observed(env, observation), float(reward), bool(terminated), bool(truncated), success

    def _observed(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        if env.render_mode == "ansi":
            return uncoloured(str(env.render())).strip("\n")
        return shown(env.observation_space, observation)


def make_handler() -> Handler:
    """Return what answers ``describe``, ``reset`` and ``step``."""
    player = Player()
    return serve(player.describe, player.reset, player.step)


def _make(id: str, options: dict[str, Any], *, ansi: bool) -> gymnasium.Env[Any, Any]:
    """Make an environment; its render mode is ``"ansi"`` or None."""
    mode = {"render_mode": "ansi"} if ansi else {}
    return gymnasium.make(_spec(id), **{"disable_env_checker": True, **mode, **options})


def _spec(id: str) -> EnvSpec:
    """Return the spec of a registered name. Raises ``ConfigError``."""
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"gymnasium has no environment {id!r}: {error}") from error


def _accepted(spec: EnvSpec) -> dict[str, Any] | None:
    """Return the arguments of ``gymnasium.make`` for an environment with their defaults; None if it takes any."""
    point = spec.entry_point
    creator: Any = load_env_creator(point) if isinstance(point, str) else point
    parameters = inspect.signature(creator).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    defaults = {p.name: None if p.default is p.empty else p.default for p in parameters if p.name != "render_mode"}
    known = {**defaults, **spec.kwargs, "max_episode_steps": spec.max_episode_steps}
    return json.loads(json.dumps(known, default=str))
