"""Players that are measured: agentkit's environments, gymnasium's FrozenLake, gym-sokoban and TextWorld.

Invariant: every implementation does the same work: a new task for every episode, and an observation after every step,
in its cheapest form. Each is imported only when it is created, because no Python has all of them.

``reset(chosen, tasks)`` begins an episode in the chosen players or raises ``Failed``; ``step(actions)`` returns for
each player whether it ended its episode, solved the task, and failed; ``elsewhere`` returns processes that work for
the players but were not started by this process.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

Flags = Sequence[Any]


class Failed(Exception):
    """A ``reset`` that failed."""


def make(count: int, *, kind: str, **arguments: Any) -> Any:
    """Return ``count`` players of a class of this module."""
    return Vector(count, **arguments) if kind == "Vector" else Several(count, globals()[kind], arguments)


class Vector:
    """agentkit's environments, created by ``make_vec``."""

    def __init__(self, count: int, id: str, mode: str, kwargs: dict[str, Any]) -> None:
        self._vector = import_module("agentkit").make_vec(id, count, mode=mode, autoreset_mode="Disabled", **kwargs)
        self._nobody = [False] * count

    def reset(self, chosen: Sequence[int], tasks: Sequence[int]) -> None:
        given = dict(zip(chosen, tasks, strict=True))
        players = range(self._vector.num_envs)
        mask = import_module("numpy").array([k in given for k in players])
        try:
            self._vector.reset(seed=[given.get(k) for k in players], options={"reset_mask": mask})
        except import_module("agentkit.errors").EnvError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def step(self, actions: Sequence[str]) -> tuple[Flags, Flags, Flags]:
        _, _, terminated, truncated, infos = self._vector.step(actions)
        return terminated | truncated, infos.get("success", self._nobody), infos.get("_failure", self._nobody)

    def elsewhere(self) -> set[int]:
        """Return the engine's shims of the containers of this process and its descendants."""
        docker, psutil = import_module("docker"), import_module("psutil")
        owner, labels = (
            import_module("agentkit.sandboxes.reaper.owner"),
            import_module("agentkit.sandboxes.reaper.labels"),
        )
        try:
            client = docker.from_env(timeout=60).api
        except docker.errors.DockerException:
            return set()
        me = psutil.Process()
        owners = [owner.Owner.of(process.pid) for process in (me, *me.children(recursive=True))]
        boxes = [box for own in owners for box in client.containers(filters={"label": f"{labels.OWNER}={own}"})]
        shims = set()
        for box in boxes:
            with suppress(docker.errors.NotFound, psutil.NoSuchProcess):  # it is being started, or removed
                shims.add(psutil.Process(client.inspect_container(box["Id"])["State"]["Pid"]).ppid())
        return shims

    def close(self) -> None:
        self._vector.close()


class Several:
    """Players of one class in this process, which step one after the other."""

    def __init__(self, count: int, kind: Any, arguments: dict[str, Any]) -> None:
        self._players = [kind(**arguments) for _ in range(count)]

    def reset(self, chosen: Sequence[int], tasks: Sequence[Any]) -> None:
        try:
            for k, task in zip(chosen, tasks, strict=True):
                self._players[k].reset(task)
        except Exception as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def step(self, actions: Sequence[Any]) -> tuple[Flags, Flags, Flags]:
        results = []
        for player, action in zip(self._players, actions, strict=True):
            try:
                results.append((*player.step(action), False))
            except Exception:
                results.append((True, False, True))
        ended, won, broken = zip(*results, strict=True)
        return ended, won, broken

    def elsewhere(self) -> set[int]:
        return set()

    def close(self) -> None:
        for player in self._players:
            getattr(player, "close", lambda: None)()


class Made:
    """An agentkit environment, created by ``make``."""

    def __init__(self, id: str) -> None:
        self._env = import_module("agentkit").make(id)
        self.close = self._env.close

    def reset(self, seed: int) -> None:
        self._env.reset(seed=seed)

    def step(self, action: str) -> tuple[bool, bool]:
        _, _, terminated, truncated, info = self._env.step(action)
        return terminated or truncated, info["success"]


class Lake:
    """gymnasium's ``FrozenLakeEnv`` on a map of gymnasium's for every episode, as numbers or as text."""

    def __init__(self, text: bool) -> None:
        self._lake, self._text = import_module("gymnasium.envs.toy_text.frozen_lake"), text

    def reset(self, seed: int) -> None:
        rows = self._lake.generate_random_map(size=4, p=0.8, seed=seed)
        mode = "ansi" if self._text else None
        self._env = self._lake.FrozenLakeEnv(desc=rows, is_slippery=False, render_mode=mode)
        self._env.reset(seed=seed)
        if self._text:
            self._env.render()

    def step(self, action: int) -> tuple[bool, bool]:
        _, reward, terminated, _, _ = self._env.step(action)
        if self._text:
            self._env.render()
        return terminated, reward == 1


class Sokoban:
    """gym-sokoban with rooms of our size, observed as its smallest images, one pixel per cell."""

    def __init__(self) -> None:
        module = import_module("gym_sokoban.envs.sokoban_env")
        self._env = module.SokobanEnv(dim_room=(6, 6), num_boxes=1, max_steps=100, reset=False)

    def reset(self, seed: int) -> None:
        random.seed(seed)  # it draws from both
        import_module("numpy").random.seed(seed)
        self._env.reset(render_mode="tiny_rgb_array")

    def step(self, action: int) -> tuple[bool, bool]:
        _, _, done, info = self._env.step(action + 1, observation_mode="tiny_rgb_array")
        return done, info.get("all_boxes_on_target", False)


class TextWorld:
    """TextWorld's ``PddlEnv`` under ALFWorld's wrapper, as ALFWorld makes it; a task is the path of a game."""

    def __init__(self) -> None:
        load = import_module("agentkit.envs.alfworld.alfworld_package").load  # without torch
        infos = load("textworld").EnvInfos(won=True, admissible_commands=True)
        wrapper = load("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
        self._env = wrapper(load("textworld.envs").PddlEnv(infos), shuffle=False)

    def reset(self, path: str) -> None:
        self._env.load(path)
        self._env.reset()

    def step(self, action: str) -> tuple[bool, bool]:
        state, _, done = self._env.step(action)
        return done, state["won"]
