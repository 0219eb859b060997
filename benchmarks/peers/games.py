"""A game whose steps are slow and sometimes hang: as an environment of agentkit, and as a class for TRL.

Invariant: an episode has ``TURNS`` steps of one call each, and all of its observations have equally many tokens.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from agentkit.envs.base import Info, TextEnv
from agentkit.tool_calls import Tool, call_of

TURNS = 5
MEAN_S, DEVIATION_S = 0.05, 0.05
"""Latency of a step: normally distributed, at least 0."""
HUNG = 0.02
"""Share of the steps that never answer."""
TIMEOUT_S = 1.0
"""Time after which a step counts as hung; the slowest of 10,000 others takes 0.25 s."""
INSTRUCTIONS = "Walk on the number line. Every step to the right is rewarded."
DIRECTIONS = ("L", "R")

_forever = threading.Event()


def delay(random: np.random.Generator) -> float:
    """Return the seconds that a step takes; infinity for a hung one."""
    if random.random() < HUNG:
        return float("inf")
    return max(0.0, random.normal(MEAN_S, DEVIATION_S))


class Line:
    """The rules of the game, with its latency."""

    def __init__(self) -> None:
        self._random = np.random.default_rng()
        self._position = self._steps = 0

    def reset(self, seed: int) -> str:
        self._position, self._steps = seed % 10, 0
        return self._text()

    def move(self, direction: str) -> tuple[str, float, bool]:
        """Return the observation, the reward, and whether the episode is over."""
        seconds = delay(self._random)
        if seconds == float("inf"):
            _forever.wait()
        else:
            time.sleep(seconds)
        self._steps += 1
        self._position = (self._position + (1 if direction == "R" else -1)) % 10
        return self._text(), (direction == "R") / TURNS, self._steps == TURNS

    def _text(self) -> str:
        return f"Position:{self._position}"


TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move by one.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "description": "L or R"}},
            "required": ["to"],
        },
    },
}


class SlowLine(TextEnv):
    """The game as an environment of agentkit, which blocks the thread that calls it."""

    instructions = INSTRUCTIONS
    tools = (TOOL,)
    max_turns = TURNS
    concurrency = "thread"

    def __init__(self) -> None:
        super().__init__()
        self._game = Line()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        return self._game.reset(seed or 0), {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        direction = call_of(action, self.tools).arguments["to"]
        text, reward, over = self._game.move(direction)
        return text, reward, over, False, {"success": over, "action_valid": direction in DIRECTIONS}


class TRLLine:
    """The game as an environment of TRL: its loop calls ``reset``, ``move`` as a tool, and ``get_reward``.

    TRL has no timeout, so that ``move`` has its own. A step that hangs ends the episode, and the reward is None.
    """

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begin an episode."""
        self._game, self._return, self._over, self._failed = Line(), 0.0, False, False
        return self._game.reset(seed)

    def move(self, to: str) -> str:
        """Move by one.

        Args:
            to: L or R

        Returns:
            The new position.
        """
        if self._over:
            return "Position:0"
        answers: list[tuple[str, float, bool]] = []
        game = self._game
        thread = threading.Thread(target=lambda: answers.append(game.move(to)), daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        if not answers:
            self._over = self._failed = True
            return "Position:0"
        text, reward, self._over = answers[0]
        self._return += reward
        return text

    def get_reward(self) -> float | None:
        """Return the sum of the rewards; None, which TRL leaves out, if a step hung."""
        return None if self._failed else self._return
