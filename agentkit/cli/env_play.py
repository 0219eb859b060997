"""Play episodes in a terminal: by hand, with the expert, or at random.

Invariant: an episode has the same limit as for a model (turns times actions per turn), and the environment is always
closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import typer

from agentkit import registry
from agentkit.envs.base import TextEnv, expert_actions
from agentkit.envs.isolation.env import SandboxedTextEnv
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import ConfigError
from agentkit.text import printable

Player = Literal["human", "expert", "random"]
Choose = Callable[[dict[str, Any]], str | None]


def play(
    id: str, arguments: dict[str, Any], *, sandbox: str | None, player: Player, seed: int, episodes: int, delay: float
) -> None:
    """Play ``episodes`` episodes and print them. Raises ``ConfigError`` if an expert is requested and missing."""
    made = registry.make(id, sandbox=sandbox, **arguments)
    env: TextEnv = made if isinstance(made, TextEnv) else SyncTextEnv(made)
    solved = 0
    try:
        rules, has_expert = _description(id, arguments, made)
        if player == "expert" and not has_expert:
            raise ConfigError(f"{id} has no expert; play with --random or by hand")
        typer.echo(f"{rules}\n")
        for episode in range(episodes):
            success = _episode(env, seed + episode, player, delay)
            if success is None:
                return
            solved += success
        if episodes > 1:
            typer.echo(f"solved {solved} of {episodes}")
    finally:
        env.close()


def _description(id: str, arguments: dict[str, Any], made: Any) -> tuple[str, bool]:
    """Return the rules of an environment, and whether it has an expert."""
    if isinstance(made, SandboxedTextEnv):
        return made.description.instructions, made.description.has_expert
    return type(made).instructions_for(**{**registry.entry(id).load().kwargs, **arguments}), type(made).has_expert()


def _episode(env: TextEnv, seed: int, player: Player, delay: float) -> bool | None:
    """Play one episode, and return its success; None if the human player stopped."""
    observation, info = env.reset(seed=seed)
    typer.echo(printable(f"seed {seed}\n{observation}"))
    choose = _chooser(env, player, seed)
    total, limit = 0.0, env.max_turns * env.actions_per_turn
    for step in range(1, limit + 1):
        action = choose(info)
        if action is None:
            typer.echo("stopped" if player == "human" else "the expert found no solution")
            return None if player == "human" else False
        observation, reward, terminated, truncated, info = env.step(action)
        total += reward
        remark = "" if info.get("action_valid", True) else "  (no such action)"
        typer.echo(printable(f"\n{step}. {action}{remark}  reward {reward:g}\n{observation}"))
        if terminated or truncated:
            break
        if player != "human":
            time.sleep(delay)
    success = bool(info.get("success"))
    typer.echo(f"\n{'solved' if success else 'not solved'}, return {total:g}")
    return success


def _chooser(env: TextEnv, player: Player, seed: int) -> Choose:
    if player == "expert":
        plan = expert_actions(env)
        return lambda info: next(plan, None)
    if player == "human":
        return _ask
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)

    def draw(info: dict[str, Any]) -> str:
        known = info.get("admissible_actions")
        return known[int(rng.integers(len(known)))] if known else env.action_space.sample()

    return draw


def _ask(info: dict[str, Any]) -> str | None:
    """Read an action from the terminal; the prefix of an admissible action is enough. None at the end of input."""
    known = info.get("admissible_actions") or []
    hint = f" [{printable('/'.join(known))}]" if 0 < len(known) <= 8 else ""
    try:
        text = input(f"action{hint} (empty to stop)> ").strip()
    except EOFError:
        return None
    matching = [action for action in known if text and action.lower().startswith(text.lower())]
    return matching[0] if len(matching) == 1 else text or None
