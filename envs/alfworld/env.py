"""The ALFWorld environment, based on the ``alfworld`` and ``textworld`` packages.

Invariant: consecutive seeds play every game of a split once before one is repeated. TextWorld and Fast Downward run
only in a worker process of each instance; a failure there is an ``EnvError`` here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from gymnasium.error import ResetNeeded

from agentkit import data as datasets
from agentkit.envs.alfworld import alfworld_package
from agentkit.envs.alfworld.games import SPLITS, GameFile, Split, games, select
from agentkit.envs.base import Info, TextEnv
from agentkit.envs.spaces import Text, encodable
from agentkit.envs.workers.client import shared_server
from agentkit.envs.workers.worker import Worker
from agentkit.errors import ConfigError, DataError, EnvCrashed

Expert = Literal["planner", "handcoded"]
STEP_TIMEOUT = 30.0
LOAD_TIMEOUT = 120.0
PLAN_TIMEOUT = 60.0
"""Seconds; the search of a planner is not bounded."""
_ENGINE = "agentkit.envs.alfworld.worker"
_ORDER = 20_210_503
"""Seed of the order of games, so that consecutive seeds are of different tasks."""
_EXAMPLES = ("look", "inventory", "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "examine fridge 1")
_reported: set[Path] = set()


class AlfWorld(TextEnv):
    """Do a household task: find, clean, heat, cool, examine or move objects.

    Action space: commands such as ``go to fridge 1``, ``open fridge 1`` and ``take apple 1 from fridge 1``.

    Observation space: the description of the room and the task; then the feedback to each command.

    Rewards: 1 when the task is done, which terminates the episode, otherwise 0.

    Args:
        split: ``"train"``, ``"valid_seen"`` or ``"valid_unseen"``.
        data: a data set of ``agentkit data list``, or a folder of games. ``"alfworld"`` is the official one.
        tasks: play only this task, or these, of the six.
        num_games: play only this many games, the first in the order of seeds; None plays all.
        upgrade: play games of version 2.1.1 (``put X in/on Y``) in the form of version 2.1.2 (``move X to Y``).
        expert: ``"planner"`` (shortest plans with full knowledge) or ``"handcoded"`` (searches for objects).
        show_actions: end every observation with the possible actions.
        render_mode: ``"ansi"`` or None.

    Raises:
        RegistryError: the extra ``alfworld`` is not installed.
        ConfigError, DataError: the split, task or data set is unknown, or ``num_games`` is invalid.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = (
        "You are in a room, and have a task to do there. You can carry one thing at a time.\n"
        "Actions: look; inventory; go to R; open R; close R; take O from R; move O to R; examine R; examine O; use O; "
        "heat O with R; cool O with R; clean O with R; slice O with O. "
        "R is a receptacle and O an object, with their numbers, as in: take apple 1 from fridge 1."
    )
    max_turns = 50
    actions_per_turn = 1
    concurrency = "thread"  # it waits for its worker process, within its timeouts
    deterministic = True

    def __init__(
        self,
        *,
        split: Split = "train",
        data: str = "alfworld-own",
        tasks: str | Sequence[str] | None = None,
        num_games: int | None = None,
        upgrade: bool = False,
        expert: Expert = "planner",
        show_actions: bool = False,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        alfworld_package.require()
        if split not in SPLITS:
            raise ConfigError(f"split={split!r} must be one of {', '.join(SPLITS)}")
        if expert not in get_args(Expert):
            raise ConfigError(f"expert={expert!r} must be 'planner' or 'handcoded'")
        if num_games is not None and (type(num_games) is not int or num_games < 1):
            raise ConfigError(f"num_games={num_games!r} must be a whole number of at least 1, or None")
        self._cache = _cache()
        folder = datasets.locate(data) if data in datasets.DATASETS else Path(data).expanduser()
        listed = select(games(folder, split, self._cache), tasks)
        self.games = tuple(listed[k] for k in np.random.default_rng(_ORDER).permutation(len(listed))[:num_games])
        """In the order of seeds."""
        self.game: GameFile | None = None
        self.action_space = Text(examples=_EXAMPLES)
        self.instructions = self.instructions_for(data=data, upgrade=upgrade)
        self._upgrade, self._expert, self._show = upgrade, expert, show_actions
        self._worker = Worker(shared_server(_ENGINE))
        self._said: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._plan: list[str] = []

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        if kwargs.get("upgrade") or kwargs.get("data", "alfworld-own") == "alfworld-own":
            return cls.instructions
        return cls.instructions.replace("move O to R", "move O to R (in older games: put O in/on R)")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start the game of ``seed``, or the one with ``options={"game": NAME}`` (``GameFile.name``).

        Raises ``EnvCrashed``, ``EnvTimeout``, and ``ConfigError`` for a game that is not in the split.
        """
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(1 << 31))
        first = seed if seed is not None else drawn
        wanted = (options or {}).get("game")
        self.game, self._said = None, {}
        if wanted is not None:
            self.game = self._load(self._named(wanted), drawn)
        else:
            # A game that cannot be loaded is skipped; the next one in the order takes its place.
            candidates = (self.games[(first + k) % len(self.games)] for k in range(len(self.games)))
            self.game = next((game for game in candidates if self._load(game, drawn) is not None), None)
        if self.game is None:
            raise EnvCrashed(f"no game can be played: {wanted or 'none of the split'} loads")
        self._metrics = {"steps": 0.0, "invalid_actions": 0.0}
        return self._observe(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if not self._said or self._said["won"] or not self._worker.alive:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        action = action.strip()
        self._plan = self._plan[1:] if self._plan[:1] == [action] else []
        self._said = self._call("step", encodable(action), timeout=STEP_TIMEOUT)
        self._metrics["steps"] += 1
        self._metrics["invalid_actions"] += not self._said["valid"]
        won = self._said["won"]
        return self._observe(), float(won), won, False, self._info()

    def expert(self) -> Iterator[str]:
        """Yield the planner's commands, or the hand-coded expert's next one; none if there is no solution.

        Raises ``EnvCrashed``, and ``EnvTimeout`` if the planner takes too long; the episode is then lost.
        """
        if not self._said:
            raise ResetNeeded("call reset() before expert()")
        if self._said["won"]:
            return
        if self._expert == "handcoded" or not self._plan:
            self._plan = self._call("plan", timeout=PLAN_TIMEOUT)
        yield from tuple(self._plan)

    def render(self) -> Any:
        """Return the last observation."""
        if not self._said:
            raise ResetNeeded("call reset() before render()")
        return self._observe() if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._worker.kill()
        self._said = {}

    def _named(self, name: str) -> GameFile:
        found = next((game for game in self.games if game.name == name), None)
        if found is None:
            raise ConfigError(f"game {name!r} is not one of the {len(self.games)} games of this split")
        return found

    def _load(self, game: GameFile, drawn: int) -> GameFile | None:
        """Load a game; warn once and return None if it cannot be loaded."""
        expert_seed = drawn if self._expert == "handcoded" else None
        cache = None if self._cache is None else str(self._cache)
        arguments = (str(game.path), game.goal, self._upgrade, expert_seed, cache)
        self._plan = []
        kind, value = self._worker.call("load", *arguments, timeout=LOAD_TIMEOUT)
        if kind == "ok":
            self._said = value
            return game
        if kind != "unplayable":
            self._worker.kill()
            raise EnvCrashed(value)
        if game.path not in _reported:
            _reported.add(game.path)
            warnings.warn(f"{game.path} cannot be played and is skipped: {value}", stacklevel=3)
        return None

    def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        kind, value = self._worker.call(name, *arguments, timeout=timeout)
        if kind != "ok":
            self._worker.kill()
            raise EnvCrashed(value)
        return value

    def _observe(self) -> str:
        feedback = self._said["feedback"]
        return f"{feedback}\n\nYou can: {'; '.join(self._said['commands'])}." if self._show else feedback

    def _info(self) -> Info:
        assert self.game is not None
        said = self._said
        return {
            "success": said["won"],
            "won": said["won"],
            "action_valid": said["valid"],
            "admissible_actions": list(said["commands"]),
            "game": self.game.name,
            "task_type": self.game.task,
            "metrics": dict(self._metrics),
        }


def _cache() -> Path | None:
    """Return the folder for the cached index and translated games; None if the machine has no such folder."""
    try:
        return datasets.derived_root() / "alfworld"
    except DataError:
        return None
