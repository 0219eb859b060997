"""Simulated workload: the time that each turn of each episode waits for its environment, drawn in advance.

All schedulers and the bound get the same numbers: the time of turn ``k`` depends only on (setting, task, member,
attempt).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Latency = Literal["gaussian", "heavy"]
Fault = Literal["none", "slow", "hung"]

ENGINE_S = 0.010
"""One answer of the simulated engine."""
SLOTS = 64
"""Answers that the simulated engine computes at once."""
HUNG_S = 3600.0


@dataclass(frozen=True)
class Workload:
    """A setting of the benchmark."""

    latency: Latency = "gaussian"
    fault: Fault = "none"
    fault_share: float = 0.02
    turns: int = 10
    seed: int = 0

    def env_seconds(self, task: int, member: int, attempt: int = 0) -> tuple[float, ...]:
        """Return the seconds that the environment takes in each turn of an episode."""
        return _draw(self, task, member, attempt)


@lru_cache(maxsize=100_000)
def _draw(load: Workload, task: int, member: int, attempt: int) -> tuple[float, ...]:
    rng = np.random.default_rng([load.seed, task, member, attempt])
    if load.latency == "gaussian":
        seconds = np.maximum(rng.normal(0.050, 0.050, load.turns), 0.0)
    else:
        # Lomax (shifted Pareto) of shape 2.5 and mean 50 ms: one wait in a thousand is 1.1 s or longer.
        seconds = 0.075 * rng.pareto(2.5, load.turns)
    if load.fault != "none" and rng.random() < load.fault_share:
        if load.fault == "slow":
            seconds = seconds * 20
        else:
            seconds[rng.integers(load.turns)] = HUNG_S
    return tuple(seconds.tolist())
