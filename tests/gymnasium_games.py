"""Environments that are registered in gymnasium when this module is imported."""

from __future__ import annotations

import os
import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Game(gymnasium.Env[Any, Any]):
    """Ends after three steps, each with reward 1."""

    metadata = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)
    observation_space: spaces.Space[Any] = spaces.Discrete(4)
    action_space: spaces.Space[Any] = spaces.Discrete(2, start=-1)

    def __init__(self, length: int = 3) -> None:
        self.length, self.steps = length, 0

    def observe(self) -> Any:
        return self.steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observe(), 1.0, self.steps == self.length, False, {}


class GlobalDice(Game):
    """Throws dice of the global generators of ``random`` and ``numpy``."""

    observation_space = spaces.Text(20)

    def observe(self) -> str:
        return f"{random.randrange(10**6)} {np.random.randint(10**6)}"


class Raises(Game):
    def step(self, action: Any) -> Any:
        raise ArithmeticError("the engine is broken")


class Dies(Game):
    def step(self, action: Any) -> Any:
        os._exit(7)


class Words(Game):
    """Repeats words; says itself whether it is solved."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(5, charset="abc")
    said = ""

    def observe(self) -> str:
        return f"you said {self.said!r}"

    def step(self, action: str) -> Any:
        self.said = action
        return self.observe(), -1.0, True, False, {"is_success": np.bool_(action == "abc")}


class Parts(Game):
    """Has observations of several parts, and actions of two numbers."""

    observation_space = spaces.Dict(
        {
            "grid": spaces.Box(0, 9, (2, 3), np.int64),
            "hand": spaces.Tuple((spaces.Discrete(5), spaces.Text(5))),
            "speed": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    action_space = spaces.MultiDiscrete([3, 4])

    def observe(self) -> Any:
        return {
            "grid": np.arange(6).reshape(2, 3),
            "hand": (np.int64(3), "ace"),
            "speed": np.array([0.25, -1 / 3], np.float32),
        }

    def step(self, action: Any) -> Any:
        return self.observe(), float(10 * action[0] + action[1]), False, False, {}


class Picture(Game):
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)


class Torque(Game):
    action_space = spaces.Box(-2, 2, (2,), np.float32)

    def step(self, action: Any) -> Any:
        return 0, float(action.sum()), False, False, {}


class Nested(Game):
    action_space = spaces.Dict({"a": spaces.Discrete(2)})


for name in ("Game", "GlobalDice", "Raises", "Dies", "Words", "Parts", "Picture", "Torque", "Nested"):
    gymnasium.register(f"{name}-v0", f"{__name__}:{name}")
