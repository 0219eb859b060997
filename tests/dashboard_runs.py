"""Run directories for the tests of the dashboard, written with the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentkit.config_io import parse_config
from agentkit.records import EVALUATION
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder
from agentkit.types import Trajectory, Turn

EVALUATED = 8


def turn(response: str, reward: float = 0.0, observation: str = "P _ G", version: int = 0) -> Turn:
    ids = np.arange(1, len(response.split()) + 2, dtype=np.int32)
    logprobs = np.linspace(-0.1, -1.0, len(ids), dtype=np.float32)
    return Turn(
        np.array([1, 2, 3], np.int32),
        ids,
        logprobs,
        ((version, len(ids)),),
        reward=reward,
        observation=observation,
        response=response,
        actions=(response,),
        generate_s=0.3,
        env_s=0.1,
    )


def episode(
    group: int, member: int, reward: float, *, version: int = 0, turns: Sequence[Turn] | None = None
) -> Trajectory:
    made = Trajectory(group, member, "FrozenLake-v1", 500 + group, version, system="Reach the goal.", duration_s=1.0)
    answer = "Right" if reward else f"Left {member}"
    made.turns = list(turns) if turns is not None else [turn("Down"), turn(answer, reward, version=version)]
    made.success = reward > 0
    return made


def make_run(path: Path, *, seed: int = 0, steps: int = 4, done: int = 4, settings: Sequence[str] = ()) -> RunDirectory:
    """Write a run with two groups of three members in each step; groups 0, 2, … have returns 0, 1, 0.

    Returns:
        The directory, which is still locked; ``release`` it.
    """
    overrides = [f"dir={path}", f"seed={seed}", f"steps={steps}", f"evaluation.episodes={EVALUATED}", *settings]
    directory = RunDirectory.create(parse_config("env: {id: FrozenLake-v1}", overrides))
    with Recorder(directory) as recorder:
        recorder.event("start", resume=False, step=0)
        _evaluate(recorder, 0, successes=2)
        for step in range(1, done + 1):
            for group in (2 * step - 2, 2 * step - 1):
                for member in range(3):
                    reward = float(group % 2 == 0 and member == 1)
                    recorder.episode(step, episode(group, member, reward, version=step - 1), "trained")
            recorder.metrics(
                step,
                {
                    "rollout/success": step / 10 + seed / 100,
                    "rollout/return_mean": step / 10,
                    "policy/entropy": 1 / step,
                },
            )
        if done == steps:
            _evaluate(recorder, done, successes=6)
            recorder.event("end", steps=steps, finished=True)
    return directory


def _evaluate(recorder: Recorder, step: int, successes: int) -> None:
    for number in range(EVALUATED):
        recorder.episode(step, episode(number, 0, float(number < successes), version=step), EVALUATION)
    failed = episode(EVALUATED, 0, 0.0, turns=[])
    failed.outcome, failed.reason = "voided", "EnvCrashed: the process ended"
    recorder.episode(step, failed, EVALUATION)
    recorder.metrics(step, {"eval/success": successes / EVALUATED, "eval/return_mean": successes / EVALUATED})
