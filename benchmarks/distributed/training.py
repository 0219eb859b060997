"""Step time of training: in one process, and on Ray with several engines and learner ranks.

All arms train the same model on the same number of episodes per step. The model imitates the expert first, so that its
answers are moves; then its weights hardly change (learning rate 1e-9), so that all steps do the same work. Arms take
turns, so that a slow minute of the machine meets all of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentkit.training import train

PARTS = ("step", "wait", "train", "publish")
"""Of a step: the whole, waiting for episodes, training until the weights are staged, and the update of the engines."""
ENV = {"id": "FrozenLake-v1", "kwargs": {"size": 4}, "max_turns": 10, "actions_per_turn": 1}
CONFIG: dict[str, Any] = {
    "env": ENV,
    "engine": {"max_batch": 128, "max_context": 640, "threads": 1},
    "rollout": {"groups": 16, "group_size": 4, "max_tokens": 8},
    "learner": {"lr": 1e-9, "max_tokens": 4096, "threads": 1},
    "checkpoint": {"every": 0},
    "evaluation": {"episodes": 1},
}
IMITATION = {"episodes": 480, "noise": 0.35, "batch_episodes": 16, "lr": 4e-3}


@dataclass(frozen=True)
class Arm:
    """A way to run: in one process, or on Ray with this many engines and ranks."""

    ray: bool
    engines: int = 1
    ranks: int = 1
    async_ratio: float = 0.0

    @property
    def name(self) -> str:
        roles = f"Ray, {self.engines} engine(s), {self.ranks} rank(s)" if self.ray else "one process"
        return f"{roles}, async ratio {self.async_ratio:g}"

    def changes(self) -> dict[str, Any]:
        """Return the settings of this arm, by section."""
        cluster = {"cluster": {}} if self.ray else {}
        return {
            **cluster,
            "engine": {"replicas": self.engines},
            "learner": {"ranks": self.ranks},
            "rollout": {"async_ratio": self.async_ratio},
        }


ARMS = (
    Arm(ray=False),
    *(Arm(True, engines, ranks) for engines in (1, 2) for ranks in (1, 2)),
    Arm(ray=False, async_ratio=1.0),
    Arm(ray=True, async_ratio=1.0),
)
SHORT_ARMS = (Arm(ray=False), Arm(True, 2, 2))


@dataclass
class Measured:
    """Runs of one arm; one list of seconds per run and part of a step."""

    arm: str
    ray: bool
    async_ratio: float
    runs: list[dict[str, list[float]]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Sampled tokens per episode, the mean of each run: the work is the same if these are."""


def measure(arms: tuple[Arm, ...], steps: int, seconds: float, *, imitate: bool) -> list[Measured]:
    """Run all arms in turn, as often as ``seconds`` allow, but at least once.

    Args:
        arms: what to compare.
        steps: counted steps of each run. The first step is not counted.
        seconds: limit of all cycles together.
        imitate: whether the model imitates the expert first.
    """
    began, longest = time.monotonic(), 0.0
    found = [Measured(arm.name, arm.ray, arm.async_ratio) for arm in arms]
    with tempfile.TemporaryDirectory(prefix="distributed-") as directory:
        config = {**CONFIG, "steps": steps + 1}
        if imitate:
            config["model"] = {"path": str(_imitated(Path(directory) / "imitation"))}
        cycle = 0
        while not cycle or time.monotonic() - began + longest < seconds:
            start = time.monotonic()
            for arm, measured in zip(arms, found, strict=True):
                _run(config, arm, Path(directory) / f"{cycle}-{arm.name}", measured)
            longest = max(longest, time.monotonic() - start)
            cycle += 1
    return found


def _imitated(directory: Path) -> Path:
    """Return a model that imitates FrozenLake's expert."""
    train({**CONFIG, "steps": 0, "imitation": IMITATION, "dir": str(directory)})
    return directory / "model"


def _run(config: Mapping[str, Any], arm: Arm, directory: Path, measured: Measured) -> None:
    sections = {name: {**config.get(name, {}), **values} for name, values in arm.changes().items()}
    counted = train({**config, **sections, "dir": str(directory)}).history[1:]
    measured.runs.append({part: [step[f"time/{part}"] for step in counted] for part in PARTS})
    measured.tokens.append(sum(step["rollout/tokens_mean"] for step in counted) / len(counted))
