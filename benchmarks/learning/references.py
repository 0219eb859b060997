"""Success of the expert and of a random player on the evaluation tasks of a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import agentkit
from agentkit import registry
from agentkit.config_io import load_config
from agentkit.envs.base import expert_actions


def expert_and_random(path: Path) -> dict[str, float]:
    """Return success rates of the environment's expert and of uniformly random valid actions, one action per turn."""
    config = load_config(path)
    settings = config.evaluation
    kind = registry.env_class(config.env.id)
    env = agentkit.make(config.env.id, **{**config.env.kwargs, **settings.kwargs})
    turns = config.env.max_turns or kind.max_turns
    rng = np.random.default_rng(0)
    solved = {"expert": 0, "random": 0}
    for seed in range(settings.first_seed, settings.first_seed + settings.episodes):
        for player in solved:
            _, info = env.reset(seed=seed)
            plan = expert_actions(env)
            for _ in range(turns):
                action = next(plan, None) if player == "expert" else str(rng.choice(info["admissible_actions"]))
                if action is None:
                    break
                _, _, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    break
            solved[player] += info["success"]
    env.close()
    return {player: count / settings.episodes for player, count in solved.items()}
