"""The environments of gymnasium as text: ``agentkit.make("gymnasium:FrozenLake-v1")``.

Invariant: rewards and the end of an episode are those of gymnasium. Observations become text by fixed rules, and an
action that does not exist changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.spaces import Text, encodable
from agentkit.errors import ConfigError
from agentkit.integrations.library import Library, ask

_WORKER = "agentkit.integrations.gymnasium_worker"
_OWN = ("actions", "rules", "success_return", "render_mode")


class GymnasiumEnv(TextEnv):
    """Play an environment that is registered in gymnasium.

    Action space: for ``Discrete``, the number or the name of an action; for ``Text``, the text; for ``Box``,
    ``MultiDiscrete`` and ``MultiBinary``, numbers with spaces between them.

    Observation space: the text that the environment renders (``render_mode="ansi"``), otherwise its observation:
    ``Text`` as it is, ``Discrete`` as a number, arrays as rows of numbers, ``Tuple`` and ``Dict`` part by part.

    Rewards: those of the environment. ``info["success"]`` is the environment's own ``success`` or ``is_success``; if it
    has none, whether the return at the end is at least ``success_return``.

    Args:
        id: a name in gymnasium, or ``"module:name"``, for which the module is imported first.
        actions: names of the actions of a ``Discrete`` space; None takes those that the environment documents.
        rules: rules of the game, as the model sees them; None takes them from the documentation of the environment.
        success_return: return of a success; None takes the environment's reward threshold, or anything above 0.
        render_mode: ``"ansi"`` or None.
        options: arguments of ``gymnasium.make``.

    Raises:
        ConfigError: gymnasium has no such environment or cannot make it, or a space has no text form.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    max_turns = 100
    actions_per_turn = 1
    concurrency = "thread"  # it waits for its worker process, within its timeouts
    deterministic = True

    def __init__(
        self,
        *,
        id: str,
        actions: Sequence[str] | None = None,
        rules: str | None = None,
        success_return: float | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        arguments = {"id": id, "actions": actions, "rules": rules, **options}
        described = _described(**arguments)
        self.instructions, self.max_turns = self.instructions_for(**arguments), self.max_turns_for(**arguments)
        self.action_space = Text(examples=described["examples"])
        threshold = described["threshold"] if success_return is None else success_return
        self._names, self._threshold = described["names"], threshold
        self._making = (id, options, described["names"], described["ansi"])
        self._library = Library(_WORKER)
        self._text = ""
        self._return = 0.0
        self._done = True

    @classmethod
    def options_for(cls, **kwargs: Any) -> dict[str, Any] | None:
        return _described(**kwargs)["options"]

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        if "id" not in kwargs:
            return cls.instructions
        described = _described(**kwargs)
        rules = described["rules"] if kwargs.get("rules") is None else kwargs["rules"]
        return f"{rules}\n{described['action']}".strip()

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        return (_described(**kwargs)["max_steps"] if "id" in kwargs else None) or cls.max_turns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(1 << 31)) if seed is None else seed
        self._text = self._library.call("reset", *self._making, drawn, options)
        self._return, self._done = 0.0, False
        return self._text, self._info(success=False, valid=True)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._done or not self._library.alive:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        result = self._library.call("step", encodable(action))
        if result is None:
            return f"There is no such action.\n{self._text}", 0.0, False, False, self._info(success=False, valid=False)
        self._text, reward, terminated, truncated, told = result
        self._return += reward
        self._done = terminated or truncated
        success = self._done and (self._succeeded() if told is None else told)
        return self._text, reward, terminated, truncated, self._info(success=success, valid=True)

    def render(self) -> Any:
        """Return the last observation (``ansi``)."""
        return self._text if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._library.close()
        self._done = True

    def _succeeded(self) -> bool:
        return self._return > 0 if self._threshold is None else self._return >= self._threshold

    def _info(self, *, success: bool, valid: bool) -> Info:
        info: Info = {"success": success, "action_valid": valid}
        return {**info, "admissible_actions": list(self._names)} if self._names else info


def _described(*, id: Any = None, actions: Sequence[str] | None = None, **kwargs: Any) -> dict[str, Any]:
    """Return the description of an environment. Raises ``ConfigError``."""
    if not isinstance(id, str):
        raise ConfigError("gymnasium needs the name of an environment, as in gymnasium:FrozenLake-v1")
    if isinstance(actions, str):
        raise ConfigError(f"actions={actions!r} must be a list of names")
    options = {name: value for name, value in kwargs.items() if name not in _OWN}
    try:
        return _description(json.dumps([id, options, actions]))
    except TypeError as error:
        raise ConfigError(f"gymnasium:{id} takes arguments of plain data (texts, numbers, lists): {error}") from None


@cache
def _description(arguments: str) -> dict[str, Any]:
    return ask(_WORKER, "describe", *json.loads(arguments))
