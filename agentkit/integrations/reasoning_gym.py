"""The datasets of reasoning-gym, each as an environment: ``agentkit.make("reasoning_gym:leg_counting")``.

Invariant: the episode with seed ``s`` is item ``s`` of the dataset that reasoning-gym generates from the same options,
and its reward is the score that reasoning-gym gives to the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.spaces import encodable
from agentkit.envs.task_files import Split, check_split
from agentkit.errors import ConfigError, EnvContractError
from agentkit.extras import require_reasoning_gym
from agentkit.integrations.library import Library, ask

_WORKER = "agentkit.integrations.reasoning_gym_worker"
_ITEMS = 1 << 31
"""Items of a dataset; larger seeds begin again at item 0."""


class ReasoningGym(TextEnv):
    """Solve a generated task of a dataset of reasoning-gym. An episode is one answer.

    Action space: the answer, in the form that the question asks for.

    Observation space: the question; after the answer, its score.

    Rewards: the score of reasoning-gym, from 0 to 1. ``success`` is a score of 1.

    Args:
        dataset: name of the dataset, such as ``"leg_counting"``.
        split: ``"train"`` plays the items with even numbers, ``"test"`` those with odd ones, which reasoning-gym
            generates from other seeds; None plays all.
        render_mode: ``"ansi"`` or None.
        options: options of the dataset, such as ``max_animals``; ``seed`` is that of the dataset (0), and ``size`` the
            number of items that are generated at once.

    Raises:
        MissingExtra: the extra ``reasoning-gym`` is not installed.
        ConfigError: there is no such dataset, or an option has a wrong value.
        ValueError: ``split`` is unknown.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = "Solve the task.\nAction: the answer alone, in the form that the task asks for."
    max_turns = 1
    actions_per_turn = 1
    concurrency = "thread"  # it waits for its worker process, within its timeouts
    deterministic = True

    def __init__(
        self, *, dataset: str, split: Split | None = None, render_mode: str | None = None, **options: Any
    ) -> None:
        super().__init__(render_mode=render_mode)
        check_split(split)
        self.options_for(dataset=dataset, **options)
        self.dataset, self.options = dataset, options
        self.split: Split | None = split
        self._library = Library(_WORKER)
        self._item: dict[str, Any] | None = None
        self._text = ""
        self._done = True

    @classmethod
    def options_for(cls, **kwargs: Any) -> dict[str, Any]:
        named = ("split", "render_mode")
        return _options(json.dumps({key: value for key, value in kwargs.items() if key not in named}, sort_keys=True))

    @classmethod
    def runs_policy_code(cls, **kwargs: Any) -> bool:
        return True  # several datasets evaluate answers as Python expressions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        number = int(self.np_random.integers(_ITEMS)) if seed is None else seed
        if self.split is not None:
            number = 2 * number + (self.split == "test")
        item = self._library.call("item", self.dataset, self.options, number % _ITEMS)
        self._item, self._text, self._done = item, item["question"], False
        return self._text, self._info({"success": False, "action_valid": True})

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._done or self._item is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self._done = True
        number = self._item["number"]
        score, problem = self._library.call("score", self.dataset, self.options, number, encodable(action))
        if not isinstance(score, float) or not 0 <= score <= 1:
            raise EnvContractError(f"{self.dataset} scored item {number} with {score}, which is not between 0 and 1")
        self._text = f"Not an answer that can be scored: {problem}." if problem else f"Score: {score:.4g}"
        info = {"success": score == 1, "action_valid": not problem, "metrics": {"score": score}}
        return self._text, score, True, False, self._info(info)

    def expert(self) -> Iterator[str]:
        """Yield the answer of reasoning-gym; nothing for a task whose answer it does not know."""
        if self._item is None:
            raise ResetNeeded("call reset() before expert()")
        if not self._done and self._item["answer"] is not None:
            yield self._item["answer"]

    def render(self) -> Any:
        """Return the last observation (``ansi``)."""
        return self._text if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._library.close()
        self._done = True

    def _info(self, info: Info) -> Info:
        assert self._item is not None
        return {**info, "dataset": self.dataset, "item": self._item["number"]}


@cache
def _options(arguments: str) -> dict[str, Any]:
    """Return the options of a dataset with their defaults. Raises ``ConfigError`` and ``MissingExtra``."""
    options = json.loads(arguments)
    dataset = options.pop("dataset", None)
    if not isinstance(dataset, str):
        raise ConfigError("reasoning_gym needs a dataset, as in reasoning_gym:leg_counting")
    require_reasoning_gym()
    return ask(_WORKER, "options", dataset, options)
