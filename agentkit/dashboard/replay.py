"""Replay a recorded episode: its environment repeats the recorded actions from the recorded seed, in a sandbox.

Invariant: no code of the environment runs in this process, and the sandbox is removed before ``replay`` returns or
raises, also if it is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from agentkit import records, registry
from agentkit.config import RunConfig
from agentkit.errors import ConfigError, EnvError, RegistryError
from agentkit.run_directory import RunDirectory
from agentkit.trainers.rollout.contract import TurnResult, check_reset, run_actions_async
from agentkit.trainers.rollout.plugin import ENV_RETURN
from agentkit.types import Trajectory, Turn

_SAFE = "local"
"""The sandbox for runs without one: it needs no image, and sees the packages that the run saw."""
_LONGEST = 50_000
"""Characters of an observation in a difference."""
_CARRIED_OUT = ("", "env", "max_turns", "context")
"""Reasons of endings before which the last answer was carried out."""
_UNCHANGED = TurnResult("", 0.0, terminated=False, truncated=False, success=False, valid=False)
"""Result of an answer without actions: the environment is not stepped."""


class ReplayedEnv(Protocol):
    """What ``compare`` calls of an environment."""

    async def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]: ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]: ...


@dataclass(frozen=True)
class Difference:
    """The first difference between a record and its replay."""

    turn: int
    """Number of the turn, from 1."""
    what: str
    """``observation``, ``reward``, ``validity`` (whether the actions exist), ``ending``, ``success`` or ``failure``
    (the environment failed)."""
    recorded: str
    replayed: str


async def replay(path: Path, number: int) -> dict[str, Any]:
    """Replay an episode in a sandbox: that of the run's ``env.sandbox``, or a local one for runs without.

    Args:
        path: the run.
        number: id of the episode.

    Returns:
        ``turns``, the number of compared ones; ``difference``, the fields of a ``Difference`` or None; ``sandbox``, the
        back end; ``seconds``; and ``note``, what was not compared, or empty.

    Raises:
        RunDirectoryError: the run has no such episode.
        ConfigError: episodes of this run cannot be replayed.
        RegistryError, SandboxError, EnvError: the environment cannot be made.
    """
    from agentkit.envs.isolation.env import SandboxedEnv
    from agentkit.envs.isolation.redundancy import Redundancy

    run = RunDirectory.open(path)
    row, trajectory = records.read_episode(run.episodes_file, number)
    config, began = run.config(), time.monotonic()
    sandbox = config.env.backend or _SAFE
    kwargs = {**config.env.kwargs, **(config.evaluation.kwargs if row.ending == records.EVALUATION else {})}
    _check(config, trajectory, kwargs, sandbox)
    env = SandboxedEnv(
        config.env.id,
        kwargs,
        sandbox=sandbox,
        sandbox_spec=config.env.sandbox_spec or None,
        step_timeout=config.env.step_timeout,
        reset_timeout=config.env.reset_timeout,
        redundancy=Redundancy(recovery="void"),
    )
    try:
        try:
            description = await env.start()
        except (RegistryError, EnvError) as error:
            raise type(error)(
                f"the environment cannot be made in a {sandbox} sandbox: {error}. The sandbox needs the packages that "
                "the run had: install the environment's extra or plug-in here, or into the image of the run. A class "
                "that a script registered is not known here: an entry point makes it known (docs/write_your_own.md)"
            ) from error
        if not description.deterministic:
            raise ConfigError(
                f"{config.env.id} declares itself not deterministic: the same actions may have other results, so its "
                "episodes are not replayed"
            )
        difference = await compare(env, trajectory, config.env.format_penalty)
    finally:
        await env.close()
    return {
        "turns": len(trajectory.turns) if difference is None else difference.turn,
        "difference": None if difference is None else asdict(difference),
        "sandbox": sandbox.partition(":")[0],
        "seconds": time.monotonic() - began,
        "note": _note(trajectory),
    }


def _check(config: RunConfig, trajectory: Trajectory, kwargs: dict[str, Any], sandbox: str) -> None:
    if config.agent is not None:
        raise ConfigError(
            "episodes of an agent are not replayed: the record does not tell the steps of the environment apart"
        )
    if trajectory.env_id != config.env.id:
        raise ConfigError(
            f"the episode is one of {trajectory.env_id}, and the run's settings describe {config.env.id}: it cannot be "
            "replayed"
        )
    if registry.arguments_here(config.env.id, kwargs, sandbox.partition(":")[0]) is not None:
        raise ConfigError(
            f"{config.env.id} makes its sandboxes itself, and holds hidden tests: its episodes are not replayed"
        )


async def compare(env: ReplayedEnv, trajectory: Trajectory, format_penalty: float) -> Difference | None:
    """Repeat the actions of an episode, and return the first difference from its record.

    Each turn compares the observation before it, then the validity and the reward of its actions, then whether the
    episode ended; the last turn also the success. An error message about the format of an answer is not compared, nor
    rewards that a plug-in replaced, nor what follows the last observation of an episode that was interrupted.

    Args:
        env: an environment before ``reset``.
        trajectory: the record.
        format_penalty: part of the rewards of invalid turns.
    """
    number, count = 1, len(trajectory.turns)
    try:
        said = check_reset(await env.reset(seed=trajectory.seed))
        for number, (turn, state) in enumerate(zip(trajectory.turns, trajectory.states, strict=True), 1):
            if said != state:
                return Difference(number, "observation", state[:_LONGEST], said[:_LONGEST])
            if number == count and interrupted(trajectory):
                return None
            result = (
                await run_actions_async(env, turn.actions) if turn.actions else _UNCHANGED._replace(observation=said)
            )
            said, last = result.observation, trajectory if number == count else None
            if (
                found := _difference(number, turn, result, last, format_penalty, ENV_RETURN in trajectory.metrics)
            ) is not None:
                return found
    except EnvError as error:
        return Difference(number, "failure", "no failure", f"{type(error).__name__}: {error}"[:_LONGEST])
    return None


def interrupted(trajectory: Trajectory) -> bool:
    """Return whether the effect of the last answer is not known: the environment failed, or the run ended."""
    return trajectory.reason not in _CARRIED_OUT


def _difference(
    number: int, turn: Turn, result: TurnResult, last: Trajectory | None, format_penalty: float, replaced: bool
) -> Difference | None:
    """Compare the result of a turn; ``last``: the episode that ends with it; ``replaced``: whether its reward was."""
    reward = result.reward if result.valid else result.reward + format_penalty
    ending = "terminated" if result.terminated else "truncated" if result.truncated else "goes on"
    compared = [("validity", _validity(turn.valid), _validity(result.valid))]
    if not replaced:
        compared.append(("reward", repr(turn.reward), repr(reward)))
    compared.append(("ending", "goes on" if last is None else _recorded_ending(last), ending))
    if last is not None and turn.actions:
        compared.append(("success", _solved(last.success), _solved(result.success)))
    return next((Difference(number, *values) for values in compared if values[1] != values[2]), None)


def _recorded_ending(trajectory: Trajectory) -> str:
    """Return how the environment ended the episode; it goes on if the run ended it."""
    if trajectory.outcome == "terminated":
        return "terminated"
    return "truncated" if trajectory.reason == "env" else "goes on"


def _validity(valid: bool) -> str:
    return "valid" if valid else "invalid"


def _solved(success: bool) -> str:
    return "solved" if success else "not solved"


def _note(trajectory: Trajectory) -> str:
    if interrupted(trajectory):
        return (
            f"The episode was interrupted ({trajectory.reason[:200]}): the effect of its last answer is not compared."
        )
    if ENV_RETURN in trajectory.metrics:
        return "A plug-in replaced the rewards of this episode: they are not compared."
    return ""


def replay_lines(found: dict[str, Any]) -> Sequence[str]:
    """Return the result of ``replay`` as lines; texts of environments in them are not made printable."""
    where = f"in a {found['sandbox']} sandbox, {found['seconds']:.1f} s"
    difference = found["difference"]
    note = [found["note"]] if found["note"] else []
    if difference is None:
        return [
            f"identical: {found['turns']} turns gave the recorded observations, rewards and ending ({where})",
            *note,
        ]
    lines = [f"turn {difference['turn']} differs: {difference['what']} ({where})", *note]
    for name in ("recorded", "replayed"):
        lines += [f"{name}:", *(f"  {line}" for line in difference[name].split("\n"))]
    return lines
