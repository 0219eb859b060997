"""Settings of the benchmark: one configuration each, and the overrides for its imitation runs and RL runs.

Invariant: all runs of a setting and seed start reinforcement learning from the same imitated model, and are evaluated
on the same tasks: test tasks, whose layouts do not occur in training (except ALFWorld: the games of training).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row group of the table."""

    name: str
    title: str
    one_imitation: bool = False
    """All seeds begin with the model that the first seed imitated with, where imitation takes longer than the rest."""
    ratios: tuple[float, ...] = (0.0, 1.0)
    """Async ratios, each of which trains from the same model."""
    seeds: int = 3
    """At most so many."""
    folder: Path = HERE
    """Where its configuration is."""

    @property
    def config(self) -> Path:
        return self.folder / f"{self.name}.yaml"


SETTINGS = (
    Setting("frozen_lake", "FrozenLake 4×4, deterministic"),
    Setting("frozen_lake_slippery", "FrozenLake 4×4, slippery", one_imitation=True),
    Setting("sokoban", "Sokoban 6×6, one box", one_imitation=True),
    Setting("webshop", "WebShop, our shop", one_imitation=True, folder=EXAMPLES),
    Setting("alfworld", "ALFWorld, 40 games of ours", one_imitation=True, ratios=(1.0,), seeds=1, folder=EXAMPLES),
)
