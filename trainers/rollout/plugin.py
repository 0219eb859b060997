"""Rewards, filters and parsers of other packages, called by the rollout loop.

Invariant: what a plug-in returns is checked before it is used; a ``PluginError`` names the plug-in and the problem. An
answer of the model that a parser reads as too many actions is the model's mistake, not the parser's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from agentkit.config import RolloutConfig, RunConfig
from agentkit.errors import ConfigError
from agentkit.plugins import FILTER, PARSER, REWARD
from agentkit.trainers.rollout.counters import TASK
from agentkit.trainers.rollout.parser import ActionParser, AnswerParser, NumberParser, ParsedAnswer
from agentkit.trainers.rollout.tools import ToolParser, ToolUse, check_settings
from agentkit.types import Group, Trajectory

ENV_RETURN = f"{TASK}env_return"
"""Metric of an episode whose rewards a plug-in replaced: its return before that."""


def reward_shaping(config: RolloutConfig) -> Callable[[Trajectory], None]:
    """Return a function that replaces the rewards of a finished episode by those of ``config.reward``.

    The plug-in returns one finite number for each turn. The environment's return stays in ``metrics``.
    """
    if config.reward is None:
        return lambda episode: None
    plugin = REWARD.load(config.reward)
    function = plugin.bind(config.reward_options)

    def shape(episode: Trajectory) -> None:
        rewards = function(episode)
        try:
            numbers = [float(reward) for reward in rewards]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != len(episode.turns) or not all(map(math.isfinite, numbers)):
            raise plugin.error(f"returned {rewards!r:.200}, not a finite number for each of {len(episode.turns)} turns")
        episode.metrics[ENV_RETURN] = episode.reward
        for turn, number in zip(episode.turns, numbers, strict=True):
            turn.reward = number

    return shape


def group_filter(config: RolloutConfig) -> Callable[[Group], bool]:
    """Return a function that tells whether ``config.filter`` uses a complete group."""
    if config.filter is None:
        return lambda group: True
    plugin = FILTER.load(config.filter)
    function = plugin.bind(config.filter_options)

    def keeps(group: Group) -> bool:
        verdict = function(group)
        if type(verdict).__name__ not in ("bool", "bool_"):  # numpy's too
            raise plugin.error(f"returned {verdict!r:.200}, not True (use the group) or False (replace it)")
        return bool(verdict)

    return keeps


def make_parser(config: RunConfig, actions_per_turn: int, tools: ToolUse | None = None) -> AnswerParser:
    """Return the parser that ``config.env.parser`` names, or that of tool calls if the environment has tools.

    Raises:
        ConfigError: a plug-in cannot write answers, and imitation needs them; or settings do not fit tools.
        PluginError: a plug-in is not a parser.
    """
    name = config.env.parser
    if tools is not None:
        check_settings(config.env.id, name, actions_per_turn)
        return ToolParser(tools)
    if name == "tagged" or name == "plain":
        return ActionParser(name, actions_per_turn)
    if name == "number":
        return NumberParser()
    parser = _PluginParser(name, config.env.parser_options, actions_per_turn)
    if config.imitation is not None and not parser.writes:
        raise ConfigError(
            f"env.parser={name} has no method `format`, which writes the expert's answers for imitation: add it, or "
            "remove the imitation section"
        )
    return parser


class _PluginParser:
    """The parser that a plug-in made, with its results checked."""

    def __init__(self, name: str, options: dict[str, Any], actions_per_turn: int) -> None:
        self._plugin = PARSER.load(name)
        self._actions_per_turn = actions_per_turn
        self._parser = self._plugin.bind(options)(actions_per_turn)
        if not callable(getattr(self._parser, "parse", None)):
            raise self._plugin.error(f"made {self._parser!r:.200}, which has no method `parse`")
        instructions = getattr(self._parser, "instructions", None)
        if not isinstance(instructions, str):
            raise self._plugin.error("has no text `instructions`, which tell the model how to answer")
        self.instructions: str = instructions
        self.writes = callable(getattr(self._parser, "format", None))
        self._parse = self._plugin.guard(self._parser.parse)

    def parse(self, text: str) -> ParsedAnswer:
        answer = self._parse(text)
        if not isinstance(answer, ParsedAnswer) or not all(isinstance(action, str) for action in answer.actions):
            raise self._plugin.error(f"read {answer!r:.200}, not a ParsedAnswer whose actions are texts")
        valid = answer.valid and 1 <= len(answer.actions) <= self._actions_per_turn
        return ParsedAnswer(tuple(answer.actions), valid=True) if valid else ParsedAnswer((), valid=False)

    def format(self, actions: Sequence[str]) -> str:
        """Return the answer for ``actions``. Raises ``ValueError`` if it is not read as these actions."""
        text = self._plugin.guard(self._parser.format)(tuple(actions))
        if not isinstance(text, str) or self.parse(text).actions != tuple(actions):
            raise ValueError(f"{self._plugin.title} writes {text!r:.200} for {list(actions)}, and reads it differently")
        return text
