"""ALFWorld played by TextWorld's own environment under ALFWorld's own wrapper, to compare ours with."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from agentkit.envs.alfworld import package


def make(game: Path | dict[str, Any]) -> Any:
    """The official environment of a game, loaded."""
    infos = package.load("textworld").EnvInfos(won=True, admissible_commands=True)
    wrapper = package.load("alfworld.agents.environment.alfred_tw_env").AlfredDemangler
    env = wrapper(package.load("textworld.envs").PddlEnv(infos), shuffle=False)
    env.load(game if isinstance(game, dict) else str(game))
    return env


def episode(env: Any, actions: list[str]) -> list[tuple[str, float, bool, list[str]]]:
    """What is said, the reward, whether it is won, and what may be done: at first and after each action."""
    state = env.reset()
    seen = [(state.feedback, 0.0, False, state["admissible_commands"])]
    for action in actions:
        state, score, done = env.step(action)
        seen.append((state.feedback, float(score), done, state["admissible_commands"]))
    return seen


def some_actions(env: Any, steps: int, seed: int) -> list[str]:
    """A random walk, with a word now and then that is no command."""
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
    """What ALFRED's domain charges: 5 for changing a thing, 1 for the rest that planners need."""
    return sum(5 if command.split()[0] in ("heat", "cool", "clean", "use") else 1 for command in plan)
