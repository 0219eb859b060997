"""The two settings, and the arms that are compared in them (plain data)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.games import TIMEOUT_S, TURNS


@dataclass(frozen=True)
class Setting:
    """A task with the sizes that all arms share."""

    name: str
    env: str
    model: str
    """Directory of the model, below that of the results."""
    groups: int
    group_size: int
    max_tokens: int
    """Maximum tokens of one answer."""
    context: int
    turns: int = 1
    env_settings: dict[str, Any] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        """Episodes of one training step."""
        return self.groups * self.group_size


SINGLE = Setting("single", "Countdown-v0", "endless", 16, 8, 32, 192)
MULTI = Setting(
    "multi", "SlowLine-v0", "calling", 8, 8, 48, 640, TURNS, {"step_timeout": TIMEOUT_S, "concurrency": "thread"}
)
SETTINGS = {setting.name: setting for setting in (SINGLE, MULTI)}

SYNC, ASYNC = "agentkit, synchronous", "agentkit, async ratio 1"
TRL, ROLLOUT = "TRL", "TRL with RolloutFunc"
FLOOR = "floor"
ARMS = (TRL, ROLLOUT, SYNC, ASYNC, FLOOR)
LEARNING_RATE, BETAS = 1e-6, (0.9, 0.95)
THREADS = 1
"""Threads of torch in each part: one for generating, and one for training."""


@dataclass(frozen=True)
class Step:
    """What one training step took; times in seconds.

    ``generation``, ``training`` and ``update`` may overlap; ``generation`` is the time in which answers are computed,
    ``waiting`` that until the episodes are complete.
    """

    seconds: float
    cpu: float
    generation: float
    training: float
    waiting: float
    update: float
    tokens: int
    """Tokens that the policy generated for the episodes of the step."""
    episodes: int
