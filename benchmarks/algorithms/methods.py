"""The tasks, the methods, and which methods are compared."""

from __future__ import annotations

from dataclasses import dataclass

TASKS = {
    "frozen_lake": "FrozenLake 4×4, deterministic",
    "countdown": "Countdown, three numbers",
    "sokoban": "Sokoban 6×6, one box",
}
"""Titles of the tasks; each has a configuration in this folder."""

_PPO = ["algorithm.advantage=gae", "critic.lr=2e-3", "critic.updates=2", "critic.warmup_steps=8"]
_ASYPPO = [*_PPO, "critic.count=2", "critic.layers=2", "critic.hidden_size=64"]
METHODS = {
    "grpo": ["algorithm.advantage=grpo"],
    "ppo": _PPO,
    "asyppo": _ASYPPO,
    "asyppo_advantage_mask_only": [*_ASYPPO, "algorithm.entropy_mask=0"],
    "asyppo_entropy_mask_only": [*_ASYPPO, "algorithm.advantage_mask=0"],
    "asyppo_no_mask": [*_ASYPPO, "algorithm.advantage_mask=0", "algorithm.entropy_mask=0"],
    "local_credit": ["algorithm.advantage=grpo", "algorithm.credit=local"],
    "global_credit": ["algorithm.advantage=grpo", "algorithm.credit=global"],
    "coupled_credit": ["algorithm.advantage=grpo", "algorithm.credit=coupled"],
}
"""Settings of each method. All use the same tasks, episodes per step, steps and loss."""


@dataclass(frozen=True)
class Comparison:
    """Methods in one table, and the one that the others are compared with."""

    title: str
    baseline: str
    methods: tuple[str, ...]


COMPARISONS = (
    Comparison(
        "Critics",
        "ppo",
        ("grpo", "ppo", "asyppo", "asyppo_advantage_mask_only", "asyppo_entropy_mask_only", "asyppo_no_mask"),
    ),
    Comparison("Attention rhythm", "grpo", ("grpo", "local_credit", "global_credit", "coupled_credit")),
)
