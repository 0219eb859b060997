"""Validate the replies of a sandboxed environment: inside, for readable errors, and again on the host.

Invariant: a validated value has the types, sizes and ranges given here, even if a hostile process sent it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from agentkit.envs.base import Concurrency, Info
from agentkit.envs.spaces import Text
from agentkit.errors import EnvContractError
from agentkit.tool_calls import Tool, check_tools

TEXT_LIMIT = 1 << 20
"""Characters of the longest observation, rendering or instructions."""
EXPERT_LIMIT = 1000
"""Actions of an expert's plan that one request returns."""
_EXAMPLES_LIMIT = 10_000
_REPR_LIMIT = 1000

Step = tuple[str, float, bool, bool, Info]


@dataclass(frozen=True)
class Description:
    """The declarations of an environment that was made."""

    instructions: str
    max_turns: int
    actions_per_turn: int
    tools: tuple[Tool, ...]
    concurrency: Concurrency
    deterministic: bool
    has_expert: bool
    runs_policy_code: bool
    render_modes: tuple[str, ...]
    render_mode: str | None
    render_fps: float | None
    observation_space: tuple[int | None, tuple[str, ...]]
    """Length of the longest text, and examples."""
    action_space: tuple[int | None, tuple[str, ...]]

    def spaces(self) -> tuple[Text, Text]:
        """Return the observation space and the action space."""
        observation, action = self.observation_space, self.action_space
        return Text(observation[0], examples=observation[1]), Text(action[0], examples=action[1])


def check_description(value: Any) -> Description:
    """Return a validated description. Raises ``EnvContractError``."""
    value = _map("description", value)
    if set(value) != set(Description.__dataclass_fields__):
        raise EnvContractError(f"the description of the environment has the fields {short(sorted(value))}")
    if value["concurrency"] not in ("inline", "thread", "process"):
        raise EnvContractError(f"concurrency is {short(value['concurrency'])}, not inline, thread or process")
    mode, fps = value["render_mode"], value["render_fps"]
    return Description(
        instructions=check_text("instructions", value["instructions"]),
        max_turns=_count("max_turns", value["max_turns"]),
        actions_per_turn=_count("actions_per_turn", value["actions_per_turn"]),
        tools=_tools(value["tools"]),
        concurrency=value["concurrency"],
        deterministic=_flag("deterministic", value["deterministic"]),
        has_expert=_flag("has_expert", value["has_expert"]),
        runs_policy_code=_flag("runs_policy_code", value["runs_policy_code"]),
        render_modes=_texts("render_modes", value["render_modes"]),
        render_mode=None if mode is None else check_text("render_mode", mode),
        render_fps=None if fps is None else _number("render_fps", fps),
        observation_space=_space("observation_space", value["observation_space"]),
        action_space=_space("action_space", value["action_space"]),
    )


def check_reset(value: Any) -> tuple[str, Info]:
    """Return observation and info. Raises ``EnvContractError``."""
    observation, info = _items("reset", value, "(observation, info)", 2)
    return check_text("the observation of reset", observation), _map("the info of reset", info)


def check_step(value: Any) -> Step:
    """Return observation, reward, terminated, truncated and info. Raises ``EnvContractError``."""
    shape = "(observation, reward, terminated, truncated, info)"
    observation, reward, terminated, truncated, info = _items("step", value, shape, 5)
    return (
        check_text("the observation of step", observation),
        _number("the reward", reward),
        _flag("terminated", terminated),
        _flag("truncated", truncated),
        _map("the info of step", info),
    )


def check_plan(value: Any) -> list[str]:
    """Return an expert's actions. Raises ``EnvContractError``."""
    return list(_texts("the expert's plan", value, EXPERT_LIMIT))


def check_rendering(value: Any) -> Any:
    """Return a text, a picture (uint8) or None. Raises ``EnvContractError``."""
    if value is None or isinstance(value, np.ndarray):
        return value
    return check_text("the rendering", value)


def check_text(name: str, value: Any) -> str:
    """Return ``value`` if it is a text of allowed length. Raises ``EnvContractError``."""
    if not isinstance(value, str):
        raise EnvContractError(f"{name} is {short(value)}, which is not a str")
    if len(value) > TEXT_LIMIT:
        raise EnvContractError(f"{name} has {len(value)} characters; the most is {TEXT_LIMIT}")
    return value


def plain(value: Any) -> Any:
    """Convert the values of ``info`` to plain data: non-finite numbers become None, other objects their ``repr``."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, int):
        return value if abs(value) < 1 << 64 else short(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return short(value, _REPR_LIMIT)


def short(value: Any, limit: int = 80) -> str:
    """Return the ``repr`` of ``value``, shortened to ``limit`` characters."""
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _items(call: str, value: Any, shape: str, count: int) -> Any:
    if type(value) not in (tuple, list) or len(value) != count:
        raise EnvContractError(f"{call} returned {short(value)} instead of {shape}")
    return value


def _map(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvContractError(f"{name} is {short(value)}, which is not a dict")
    return value


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return number
    raise EnvContractError(f"{name} is {short(value)}, which is not a finite number")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise EnvContractError(f"{name} is {short(value)}, which is not a bool")
    return bool(value)


def _count(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 31:
        raise EnvContractError(f"{name} is {short(value)}, which is not a positive integer")
    return value


def _texts(name: str, value: Any, limit: int = _EXAMPLES_LIMIT) -> tuple[str, ...]:
    if type(value) not in (tuple, list) or len(value) > limit:
        raise EnvContractError(f"{name} is {short(value)}, which is not a list of at most {limit} texts")
    return tuple(check_text(name, item) for item in value)


def _tools(value: Any) -> tuple[Tool, ...]:
    try:
        return check_tools(value)
    except ValueError as error:
        raise EnvContractError(f"the description of the environment: {error}") from None


def _space(name: str, value: Any) -> tuple[int | None, tuple[str, ...]]:
    longest, examples = _items(name, value, "(longest text, examples)", 2)
    if longest is not None and (type(longest) is not int or not 0 <= longest <= 1 << 31):
        raise EnvContractError(f"{name} has the longest text {short(longest)}, which is not a number of characters")
    return longest, _texts(name, examples)
