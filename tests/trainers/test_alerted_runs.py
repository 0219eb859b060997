"""Alerts of real runs: one with each of several faults, and one without."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import agentkit
from agentkit import TextEnv
from agentkit.alerts import EARLIER_STEPS, SHARE_STEPS
from agentkit.config import RunConfig
from agentkit.run_directory import RunDirectory
from agentkit.trainers import controller
from agentkit.trainers.inference.batch import RunningBatch

SMALL: dict[str, Any] = {
    "steps": SHARE_STEPS + 1,
    "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
    "engine": {"max_context": 256, "max_batch": 16},
    "rollout": {"groups": 4, "group_size": 4, "max_tokens": 6},
    "learner": {"lr": 1e-3},
    "evaluation": {"episodes": 1},
}


class Viewer:
    """A view that keeps the messages, and calls ``on_step``."""

    def __init__(self, on_step: Callable[[int], object]) -> None:
        self.messages: list[str] = []
        self._on_step = on_step

    def start(self, config: RunConfig) -> None: ...

    def stage(self, name: str) -> None: ...

    def stop(self) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._on_step(step)

    def message(self, text: str) -> None:
        self.messages.append(text)


def small(directory: Path, **changes: Any) -> RunConfig:
    sections = {
        key: {**SMALL.get(key, {}), **value} if isinstance(value, dict) else value for key, value in changes.items()
    }
    return RunConfig.model_validate({**SMALL, **sections, "dir": directory})


async def play(
    config: RunConfig, *, resume: bool = False, stop_after: int | None = None, on_step: Callable[[int], object] = id
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run, and return all recorded events of alerts, and the messages of this session."""
    stop = asyncio.Event()

    def watch(step: int) -> None:
        on_step(step)
        if step == stop_after:
            stop.set()

    viewer = Viewer(watch)
    directory = RunDirectory.resume(config.dir, config) if resume else RunDirectory.create(config)
    try:
        await controller.run(config, directory, resume=resume, view=viewer, stop=stop)
    finally:
        directory.release()
    events = [json.loads(line) for line in directory.events_file.read_text().splitlines()]
    return [event for event in events if event["event"].startswith("alert")], viewer.messages


def found(events: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(event["name"], event["subject"]) for event in events if event["event"] == "alert"}


async def test_answers_that_never_end_are_reported_once_also_by_a_resumed_run(tmp_path: Path) -> None:
    config = small(tmp_path / "run", steps=SHARE_STEPS + 3)  # a model that was never trained
    events, messages = await play(config, stop_after=SHARE_STEPS + 1)
    assert found(events) == {("truncated", "answers"), ("no_signal", "groups")}
    assert [event["step"] for event in events] == [SHARE_STEPS] * 2
    (cut,) = (event for event in events if event["name"] == "truncated")
    for part in (cut["text"], cut["cause"], "Raise `rollout.max_tokens`"):
        assert [part in text for text in messages if "alert in step 5" in text].count(True) == 1
    again, messages = await play(config, resume=True)
    assert again == events
    assert not any("alert" in text for text in messages)


class Breaking(TextEnv):
    """One step to success; every third reset fails."""

    instructions = "Say anything."
    max_turns = 1
    concurrency = "inline"
    deterministic = False
    resets = itertools.count()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if next(self.resets) % 3 == 0:
            raise RuntimeError("broken on arrival")
        return "go", {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "done", float(len(action) % 2), True, False, {"success": True, "action_valid": True}


class Brief(Breaking):
    """The same without failures."""

    resets = itertools.repeat(1)  # type: ignore[assignment]


async def test_environments_that_fail_are_lost_episodes_of_one_type(tmp_path: Path) -> None:
    agentkit.register("Breaking-v1", Breaking)
    env = {"id": "Breaking-v1", "kwargs": {}, "parser": "plain", "max_turns": 1}
    events, messages = await play(small(tmp_path / "run", env=env))
    assert {("aborts", "episodes"), ("one_failure", "EnvCrashed")} <= found(events)
    (lost,) = (event for event in events if event["name"] == "aborts")
    assert "mostly with EnvCrashed" in lost["cause"]
    assert any("agentkit env check" in text for text in messages)


async def test_a_policy_that_moves_too_far_is_off_policy(tmp_path: Path) -> None:
    agentkit.register("Brief-v1", Brief)
    env = {"id": "Brief-v1", "kwargs": {}, "parser": "plain", "max_turns": 1}
    events, _ = await play(small(tmp_path / "run", env=env, learner={"lr": 0.05, "epochs": 4}))
    (drift,) = (event for event in events if event["subject"] == "policy/kl_behaviour")
    assert drift["name"] == "off_policy"
    assert "learner.lr" in drift["remedy"]


class Sleepy(Breaking):
    """The same without failures; sleeps once if the file ``asleep`` exists."""

    resets = itertools.repeat(1)  # type: ignore[assignment]

    def __init__(self, asleep: str) -> None:
        super().__init__()
        self._asleep = Path(asleep)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._asleep.exists():
            self._asleep.unlink()
            time.sleep(15)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_batch_that_waits_for_an_environment_is_slow(tmp_path: Path) -> None:
    agentkit.register("Sleepy-v1", Sleepy)
    asleep = tmp_path / "asleep"
    env = {"id": "Sleepy-v1", "kwargs": {"asleep": str(asleep)}, "parser": "plain", "max_turns": 1}
    last = EARLIER_STEPS + 1
    config = small(tmp_path / "run", env=env, steps=last + 1)
    events, messages = await play(config, on_step=lambda step: asleep.touch() if step == last - 1 else None)
    (slow,) = (event for event in events if event["name"] == "slow_phase")
    assert (slow["subject"], slow["step"]) == ("time/wait", last)
    assert any(text.startswith(f"alert in step {last}: waiting for episodes took") for text in messages)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_engine_that_is_slower_than_its_peer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, engines = RunningBatch.step, []

    def slowed(batch: RunningBatch, *arguments: Any) -> Any:
        if batch not in engines:
            engines.append(batch)
        if batch is engines[0]:
            time.sleep(0.2)
        return compute(batch, *arguments)

    monkeypatch.setattr(RunningBatch, "step", slowed)
    config = small(tmp_path / "run", steps=4, engine={"replicas": 2}, rollout={"groups": 8})
    events, _ = await play(config)
    (slow,) = (event for event in events if event["name"] == "slow_host")
    assert slow["subject"].startswith("engine ")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_healthy_run_has_no_alert(tmp_path: Path) -> None:
    imitation = {"episodes": 768, "batch_episodes": 16, "lr": 4e-3, "schedule": "linear"}
    env = {"kwargs": {"size": 2, "is_slippery": True}, "max_turns": 4}  # with luck, each policy succeeds sometimes
    rollout = {"groups": 8, "max_tokens": 8, "async_ratio": 1.0}
    config = small(tmp_path / "run", steps=8, imitation=imitation, env=env, rollout=rollout, learner={"lr": 1e-4})
    events, messages = await play(config)
    assert events == []
    assert not any("alert" in text for text in messages)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("time/step" in row for row in rows) == config.steps > SHARE_STEPS
