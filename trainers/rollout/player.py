"""Who plays the episodes of a run: the built-in loop, or an agent of the user."""

from __future__ import annotations

from typing import Protocol

from agentkit.config import RunConfig
from agentkit.trainers.inference.base import TokenGenerator
from agentkit.trainers.rollout.episode import EpisodeRules, Player
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.types import Trajectory


class EpisodePlayer(Protocol):
    """Plays episodes; keeps no state between episodes."""

    rules: EpisodeRules

    async def play(self, trajectory: Trajectory, env: EnvHandle) -> None:
        """Play one episode in ``env`` and record it in ``trajectory``.

        Raises ``EnvError`` (the episode is void; its turns stay recorded), ``EngineError`` or ``ConfigError``.
        """
        ...

    async def close(self) -> None:
        """Close what episodes needed. Idempotent."""
        ...


def make_player(
    config: RunConfig, engine: TokenGenerator, renderer: ChatRenderer, parser: AnswerParser, rules: EpisodeRules
) -> EpisodePlayer:
    """Return the player that ``config.agent`` asks for.

    Raises:
        ConfigError: the agent cannot be loaded.
    """
    if config.agent is None:
        return Player(engine, renderer, parser, rules)
    from agentkit.trainers.endpoint.agent import AgentPlayer

    return AgentPlayer(config.agent, config.model, engine, renderer, parser, rules)
