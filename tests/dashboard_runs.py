"""Run directories for the tests of the dashboard, written with the recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentkit import records
from agentkit.config_io import parse_config
from agentkit.jsonl import JsonlWriter
from agentkit.records import EVALUATION, PendingEpisode
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder
from agentkit.types import Trajectory, Turn

EVALUATED = 8
STARTED = 1_800_000_000.0
"""When the runs of ``make_pipeline_run`` started."""

HOSTILE = (
    "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
    "\x1b]0;title\x07\x1b[2J \u202ereversed\u202c \ud800 \u2028 end"
)


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


def make_pipeline_run(path: Path, *, text: str = "it did not answer") -> RunDirectory:
    """Write a run of three steps with three engines, at fixed times.

    The steps begin 0, 4 and 10 s after ``STARTED``; each waits 1 s, trains 2 s and publishes 1 s. Its first group is
    complete when it begins, its second one a second later; an episode takes 3 s, half of it in generation and a quarter
    in the environment. The run was resumed after step 1. ``text`` is the cause of the loss of engine 1.

    Returns:
        The directory, which is still locked; ``release`` it.
    """
    overrides = [f"dir={path}", "steps=3", "rollout.groups=2", "rollout.group_size=2", "rollout.async_ratio=1.5"]
    overrides += ["rollout.extra_groups=1", "gate.policy=drop"]
    directory = RunDirectory.create(parse_config("env: {id: FrozenLake-v1}", overrides))
    _write(directory.metrics_file, [_step_metrics(step, begins) for step, begins in enumerate((0, 4, 10), 1)])
    _write(directory.events_file, _pipeline_events(text))
    pending = []
    for step, begins in enumerate((0, 4, 10), 1):
        for group in (2 * step - 2, 2 * step - 1):
            for member in range(2):
                reward = float(group % 2 == 0 and member == 1)
                turns = [replace(turn(answer), generate_s=0.75, env_s=0.375) for answer in ("Down", "Right")]
                turns[-1].reward = reward
                made = replace(episode(group, member, reward, version=step - 1, turns=turns), duration_s=3.0)
                made.ended_at = STARTED + begins + group % 2
                pending.append(PendingEpisode(step, made, "trained", ""))
    for member in range(2):
        made = episode(50, member, 1.0, turns=[turn("Down"), turn("Left 0", 1.0)])
        pending.append(PendingEpisode(3, made, "dropped", "zero_signal"))
    pending.append(PendingEpisode(3, episode(51, 0, 0.0), "cancelled", "shutdown"))
    db = records.open_for_writing(directory.episodes_file)
    records.insert(db, pending)
    db.close()
    return directory


def _step_metrics(step: int, begins: float) -> dict[str, float]:
    ages = ({0: 1.0}, {0: 0.5, 1: 0.5}, {1: 0.5, 2: 0.5})[step - 1]
    engines = {
        f"engine/{index}/{name}": value
        for index in range(3)
        for name, value in (
            ("tokens_per_s", 30.0),
            ("busy_share", 0.6),
            ("reused_share", 0.5),
            ("in_flight", 2.0),
            ("version", float(step - (index == 1))),
            ("restarts", float(index == 2)),
        )
    }
    return {
        "step": step,
        "time": STARTED + begins + 4,
        "time/wait": 1.0,
        "time/train": 2.0,
        "time/publish": 1.0,
        "time/step": 4.0,
        "gate/running": 3.0,
        "gate/ready": 1.0,
        "gate/dropped": 2.0 * (step == 3),
        "rollout/zero_signal_share": 0.5,
        "staleness/mean": sum(age * share for age, share in ages.items()),
        "staleness/max": float(max(ages)),
        **{f"staleness/hist_{age}": share for age, share in ages.items()},
        "engine/busy_share": 0.6,
        "engine/tokens_per_s": 90.0,
        **engines,
        "sandbox/host/third:8765/sandboxes": 5.0,
    }


def _pipeline_events(text: str) -> list[dict[str, object]]:
    def placed(after: float, role: str, index: int, host: str, pid: int) -> dict[str, object]:
        place = {"role": role, "index": index, "host": host, "pid": pid}
        return {"event": "role_placed", "time": STARTED + after, **place}

    return [
        {"event": "start", "time": STARTED - 1, "resume": False, "step": 0},
        placed(-1, "learner", 0, "first", 10),
        {
            "event": "engine_lost",
            "time": STARTED + 2,
            "engine": 2,
            "version": 0,
            "error": "EngineHung",
            "text": "hangs",
        },
        {"event": "start", "time": STARTED + 4, "resume": True, "step": 1},
        placed(4, "learner", 0, "first", 11),
        placed(4, "engine", 0, "first", 12),
        placed(4, "engine", 1, "second", 13),
        {"event": "engine_lost", "time": STARTED + 9.5, "engine": 1, "version": 2, "error": "EngineHung", "text": text},
        placed(9.6, "engine", 1, "second", 14),
        {"event": "no_signal", "time": STARTED + 14, "step": 3, "reason": "all returns are equal"},
    ]


def _write(file: Path, lines: Sequence[dict[str, object]] | Sequence[dict[str, float]]) -> None:
    writer = JsonlWriter(file)
    for line in lines:
        writer.write(line)
    writer.close()


def make_sandbox_run(path: Path, *, text: str = "no route to host") -> RunDirectory:
    """Write a run of two steps whose environments were in sandboxes of two hosts, some of which failed.

    Episodes 1 and 2 were in sandbox ``ak-1`` of host ``one``; the second one continued in ``ak-4`` of host ``two``.
    ``text`` is the reason for which host ``two`` went down.

    Returns:
        The directory, which is still locked; ``release`` it.
    """
    directory = RunDirectory.create(parse_config("env: {id: FrozenLake-v1}", [f"dir={path}", "steps=2"]))
    first = {"busy": 4.0, "created": 6.0, "removed": 1.0, "removed/oom": 1.0, "recoveries": 4.0, "lost_s": 2.5}
    first |= {"recoveries/oom": 4.0, "recovered_by/standby": 3.0, "recovered_by/new": 1.0, "recovery_s_max": 1.25}
    second = {"busy": 2.0, "idle": 1.0, "created": 1.0, "create_failures": 1.0, "removed": 1.0, "recoveries": 1.0}
    second |= {"removed/canary_failed": 1.0, "recovered_by/spare": 1.0, "spares": 1.0, "standbys": 2.0, "hedges": 5.0}
    second |= {"hedges_won": 2.0, "host/one/sandboxes": 3.0, "host/one/cpu": 0.5, "host/one/memory": 0.25}
    lines = [
        {"step": step, "time": STARTED + 20.0 * step, **{f"sandbox/{name}": value for name, value in values.items()}}
        for step, values in ((1, first), (2, second))
    ]
    _write(directory.metrics_file, lines)

    def event(after: float, kind: str, **fields: object) -> dict[str, object]:
        return {"event": kind, "time": STARTED + after, **fields}

    one, two = {"sandbox": "ak-1", "host": "one"}, {"sandbox": "ak-2", "host": "two"}
    _write(
        directory.events_file,
        [
            event(0, "start", resume=False, step=0),
            event(10, "sandbox_lost", **one, cause="oom", in_use=True),
            event(11, "sandbox_recovered", **one, cause="oom", by="standby", episodes=3, seconds=0.5),
            event(12, "sandbox_recovered", **one, cause="oom", by="new", episodes=1, seconds=1.25),
            event(21, "sandbox_lost", **two, cause="canary failed", in_use=False),
            event(22, "sandbox_host", host="two", before="up", state="down", reason=text),
            event(23, "sandbox_not_created", error="EngineUnavailable"),
            event(24, "env_recovered", cause="EnvCrashed", by="new", episodes=1, seconds=0.25, error=text),
            event(
                25,
                "sandbox_recovered",
                sandbox="ak-3",
                host="one",
                cause="EnvTimeout",
                by="spare",
                episodes=1,
                seconds=4.0,
            ),
            event(26, "sandbox_events_omitted", sandbox_lost=4),
        ],
    )
    pending = []
    for number, places in enumerate(((("one", "ak-1"),), (("one", "ak-1"), ("two", "ak-4")), ())):
        made = replace(episode(0, number, 0.0), duration_s=4.0, sandboxes=places, ended_at=STARTED + 9 + number)
        pending.append(PendingEpisode(1, made, "trained", ""))
    db = records.open_for_writing(directory.episodes_file)
    records.insert(db, pending)
    db.close()
    return directory
