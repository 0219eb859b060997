"""Reference implementation of ALFWorld: TextWorld's environment under ALFWorld's wrapper."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from agentkit.envs.alfworld import alfworld_package


def make(game: Path | dict[str, Any]) -> Any:
    """Return the official environment with a game loaded."""
    infos = alfworld_package.load("textworld").EnvInfos(won=True, admissible_commands=True)
    wrapper = alfworld_package.load("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
    env = wrapper(alfworld_package.load("textworld.envs").PddlEnv(infos), shuffle=False)
    env.load(game if isinstance(game, dict) else str(game))
    return env


def episode(env: Any, actions: list[str]) -> list[tuple[str, float, bool, list[str]]]:
    """Return the text, the reward, success and admissible commands: at the start and after each action."""
    state = env.reset()
    seen = [(state.feedback, 0.0, False, state["admissible_commands"])]
    for action in actions:
        state, score, done = env.step(action)
        seen.append((state.feedback, float(score), done, state["admissible_commands"]))
    return seen


def some_actions(env: Any, steps: int, seed: int) -> list[str]:
    """Return a random walk with occasional invalid commands."""
    rng, state, actions = random.Random(seed), env.reset(), []
    for _ in range(steps):
        actions.append(rng.choice(state["admissible_commands"]) if rng.random() < 0.9 else "dance")
        state, _, done = env.step(actions[-1])
        if done:
            break
    return actions


def playable(folder: Path) -> list[str]:
    """The official filter of one split, as ALFWorld's own environment applies it."""
    names = []
    for trajectory in folder.rglob("traj_data.json"):
        root = trajectory.parent
        game = root / "game.tw-pddl"
        if "movable" in str(root) or "Sliced" in str(root) or not game.exists():
            continue
        if json.loads(game.read_text()).get("solvable") is True:
            names.append(root.relative_to(folder).as_posix())
    return sorted(names)


def costs(plan: list[str]) -> int:
    """Return the action costs of ALFRED's domain: 5 for changing an object, 1 for other actions that planners need."""
    return sum(5 if command.split()[0] in ("heat", "cool", "clean", "use") else 1 for command in plan)
