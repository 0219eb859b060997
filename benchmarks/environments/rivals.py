"""What there is beside agentkit: gymnasium's FrozenLake, gym-sokoban, and TextWorld itself playing ALFWorld's games.

Invariant: each does what a player of ours gets: a new task for every episode, and what there is to see after every
step, in the cheapest form that it offers. All are in this process; a step of several is taken by one after the other.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from typing import Any


class Lake:
    """gymnasium's ``FrozenLakeEnv`` on a map of gymnasium's for every episode, as numbers or as text."""

    def __init__(self, text: bool) -> None:
        self._lake = importlib.import_module("gymnasium.envs.toy_text.frozen_lake")
        self._text = text
        self._env: Any = None

    def reset(self, seed: int) -> None:
        rows = self._lake.generate_random_map(size=4, p=0.8, seed=seed)
        self._env = self._lake.FrozenLakeEnv(
            desc=rows, is_slippery=False, render_mode="ansi" if self._text else None
        )
        self._env.reset(seed=seed)
        if self._text:
            self._env.render()

    def step(self, action: int) -> tuple[bool, bool]:
        _, reward, terminated, _, _ = self._env.step(action)
        if self._text:
            self._env.render()
        return terminated, reward == 1


class Sokoban:
    """gym-sokoban with rooms of our size, seen as its smallest pictures, of a pixel a cell."""

    def __init__(self) -> None:
        self._random = importlib.import_module("numpy").random
        module = importlib.import_module("gym_sokoban.envs.sokoban_env")
        self._env = module.SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=100, reset=False)

    def reset(self, seed: int) -> None:
        random.seed(seed)  # it draws from both of these
        self._random.seed(seed)
        self._env.reset(render_mode="tiny_rgb_array")

    def step(self, action: int) -> tuple[bool, bool]:
        _, _, done, info = self._env.step(action, observation_mode="tiny_rgb_array")
        return done, info.get("all_boxes_on_target", False)


class TextWorld:
    """TextWorld's ``PddlEnv`` under ALFWorld's wrapper, as ALFWorld makes it; a task is the path of a game."""

    def __init__(self) -> None:
        package = importlib.import_module("agentkit.envs.alfworld.package")  # their loader, without torch
        infos = package.load("textworld").EnvInfos(won=True, admissible_commands=True)
        wrapper = package.load("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
        self._env = wrapper(package.load("textworld.envs").PddlEnv(infos), shuffle=False)

    def reset(self, path: str) -> None:
        self._env.load(path)
        self._env.reset()

    def step(self, action: str) -> tuple[bool, bool]:
        state, _, done = self._env.step(action)
        return done, state["won"]


class Several:
    def __init__(self, envs: Sequence[Any]) -> None:
        self._envs = envs

    def reset(self, chosen: Sequence[int], tasks: Sequence[Any]) -> None:
        for k, task in zip(chosen, tasks, strict=True):
            self._envs[k].reset(task)

    def step(self, actions: Sequence[Any]) -> tuple[Sequence[bool], Sequence[bool], Sequence[bool]]:
        ended, won = zip(*(env.step(action) for env, action in zip(self._envs, actions, strict=True)), strict=True)
        return ended, won, [False] * len(ended)

    def close(self) -> None:
        return


def players(count: int, *, rival: str, **arguments: Any) -> Several:
    return Several([globals()[rival](**arguments) for _ in range(count)])


def elsewhere() -> set[int]:
    return set()
