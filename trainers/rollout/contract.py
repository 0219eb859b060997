"""Call environments and validate their results, on either side of a process boundary.

Invariant: a validated result has plain, finite values; an invalid one raises an ``EnvError`` that names the call.
Imports neither torch nor any environment, because every worker process loads this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from agentkit.errors import EnvContractError, EnvCrashed, EnvError

_MOST_METRICS = 64


class TurnResult(NamedTuple):
    """The result of the actions of one turn."""

    observation: str
    """Observation after the last action."""
    reward: float
    """Sum over the actions."""
    terminated: bool
    truncated: bool
    success: bool
    valid: bool
    """Whether all actions exist."""
    metrics: Mapping[str, float] = {}
    """``info["metrics"]`` after the last action."""


def run_reset(env: Any, seed: int) -> str:
    """Reset ``env`` and return the first observation. Raises ``EnvCrashed`` or ``EnvContractError``."""
    try:
        result = env.reset(seed=seed)
    except EnvError:
        raise
    except (Exception, SystemExit) as error:
        raise crashed("reset", error) from error
    return check_reset(result)


def run_actions(env: Any, actions: Sequence[str]) -> TurnResult:
    """Take ``actions`` in order until one ends the episode or does not exist.

    Raises ``EnvCrashed`` or ``EnvContractError``.
    """
    total = 0.0
    result = None
    for action in actions:
        try:
            raw = env.step(action)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise crashed("step", error) from error
        result = check_step(raw)
        total += result.reward
        if result.terminated or result.truncated or not result.valid:
            break
    return summed(result, total)


async def run_actions_async(env: Any, actions: Sequence[str]) -> TurnResult:
    """As ``run_actions``, for an environment whose ``step`` is a coroutine."""
    total = 0.0
    result = None
    for action in actions:
        try:
            raw = await env.step(action)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise crashed("step", error) from error
        result = check_step(raw)
        total += result.reward
        if result.terminated or result.truncated or not result.valid:
            break
    return summed(result, total)


def summed(last: TurnResult | None, total: float) -> TurnResult:
    """Return the result of a turn from its last action and the sum of rewards."""
    if last is None:
        raise ValueError("a turn takes at least one action")
    return last if last.reward == total else last._replace(reward=total)


def check_reset(result: Any) -> str:
    """Return the observation from the result of ``reset``. Raises ``EnvContractError``."""
    if type(result) is not tuple or len(result) != 2:
        raise EnvContractError(f"reset returned {_short(result)} instead of (observation, info)")
    observation, info = result
    if not isinstance(observation, str):
        raise EnvContractError(f"reset returned the observation {_short(observation)}, which is not a str")
    if not isinstance(info, dict):
        raise EnvContractError(f"reset returned the info {_short(info)}, which is not a dict")
    return observation


def check_step(result: Any) -> TurnResult:
    """Return the result of ``step`` as plain values. Raises ``EnvContractError``."""
    if type(result) is not tuple or len(result) != 5:
        raise EnvContractError(
            f"step returned {_short(result)} instead of (observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, str):
        raise EnvContractError(f"step returned the observation {_short(observation)}, which is not a str")
    if not isinstance(reward, (float, int, Real)) or not math.isfinite(reward):
        raise EnvContractError(f"step returned the reward {_short(reward)}, which is not a finite number")
    if not isinstance(info, dict):
        raise EnvContractError(f"step returned the info {_short(info)}, which is not a dict")
    success: Any = info.get("success")
    valid: Any = info.get("action_valid")
    return TurnResult(
        observation,
        float(reward),
        terminated if terminated.__class__ is bool else _flag("terminated", terminated),
        truncated if truncated.__class__ is bool else _flag("truncated", truncated),
        success if success.__class__ is bool else _flag("info['success']", success),
        valid if valid.__class__ is bool else _flag("info['action_valid']", valid),
        _metrics(info["metrics"]) if "metrics" in info else {},
    )


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise EnvContractError(f"step returned {name} = {_short(value)}, which is not a bool")
    return bool(value)


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > _MOST_METRICS:
        raise EnvContractError(
            f"step returned info['metrics'] = {_short(value)}, which is not a dict of at most {_MOST_METRICS}"
        )
    for name, number in value.items():
        if not isinstance(name, str) or not isinstance(number, (float, int, Real)) or not math.isfinite(number):
            raise EnvContractError(
                f"step returned info['metrics'][{_short(name)}] = {_short(number)}, which is not a finite number"
            )
    return {name: float(number) for name, number in value.items()}


def crashed(call: str, error: BaseException) -> EnvCrashed:
    """Return an ``EnvCrashed`` for an exception of an environment, with the line that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None else ""
    return EnvCrashed(f"{call} raised {type(error).__name__}: {error}{where}")


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return text if len(text) <= 80 else text[:77] + "..."
