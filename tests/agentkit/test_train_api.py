"""``agentkit.train`` and ``agentkit.evaluate`` as scripts and notebooks call them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentkit
from agentkit.errors import ConfigError, MissingExtra, RunDirectoryError
from agentkit.jsonl import read_jsonl
from agentkit.records import Filter, list_episodes

SMALL: dict[str, Any] = {
    "steps": 2,
    "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
    "engine": {"max_context": 256, "max_batch": 8},
    "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6},
    "learner": {"lr": 1e-3},
    "evaluation": {"episodes": 2},
}


def small(directory: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "dir": directory, **changes}


def test_a_dict_is_trained_and_the_callbacks_see_every_step_and_episode(tmp_path: Path) -> None:
    steps: list[int] = []
    metrics: list[Mapping[str, float]] = []
    episodes: list[agentkit.Trajectory] = []

    def on_step(step: int, values: Mapping[str, float]) -> None:
        steps.append(step)
        metrics.append(values)

    config = small(tmp_path / "run")
    result = agentkit.train(config, overrides=["evaluation.every=1"], on_step=on_step, on_episode=episodes.append)
    assert config == small(tmp_path / "run"), "the caller's dict was changed"
    assert (result.directory, result.steps, result.ending) == (tmp_path / "run", 2, "finished")
    assert result.success_before is not None
    assert result.success_after is not None
    assert steps == [row["step"] for row in result.history] == [1, 2]
    assert [row["policy/loss"] for row in result.history] == pytest.approx([row["policy/loss"] for row in metrics])
    assert result.metrics == result.history[-1]
    assert [row["step"] for row in result.evaluations] == [0, 1, 2]
    assert result.evaluations[-1]["eval/success"] == result.success_after
    recorded = list_episodes(tmp_path / "run" / "episodes.sqlite", Filter(ending="trained"))
    assert len(episodes) == len(recorded) == 2 * 2 * 2
    assert {(t.group_id, t.member) for t in episodes} == {(row.group_id, row.member) for row in recorded}


def test_the_dashboard_is_served_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[httpx.Response] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        address, token = capsys.readouterr().out.split()[-1].split("?token=")
        answers.append(httpx.get(f"{address}api/runs", headers={"Authorization": f"Bearer {token}"}))

    agentkit.train(small(tmp_path / "run"), overrides=["steps=1"], on_step=on_step, dashboard=True)
    (answer,) = answers
    assert [(run["name"], run["status"], run["steps"]) for run in answer.json()] == [("run", "running", 1)]
    with pytest.raises(httpx.ConnectError):
        httpx.get(str(answer.url))


async def test_it_works_where_an_event_loop_is_running(tmp_path: Path) -> None:
    threads: set[threading.Thread] = set()
    config = agentkit.load_config(small(tmp_path / "run"), ["steps=1"])
    result = agentkit.train(config, on_step=lambda step, metrics: threads.add(threading.current_thread()))
    assert result.finished
    assert threads
    assert threading.main_thread() not in threads
    measured = agentkit.evaluate(result.directory, episodes=3)
    assert measured.episodes == len(measured.trajectories) == 3
    low, high = measured.success_interval()
    assert 0 <= low <= measured.success <= high <= 1
    await asyncio.sleep(0)  # the caller's loop still works


@pytest.mark.parametrize("broken", ["on_step", "on_episode"])
def test_an_error_of_a_callback_ends_the_run_with_a_checkpoint(tmp_path: Path, broken: str) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("from the caller")

    callback: dict[str, Any] = {broken: fail}
    config = small(tmp_path / "run", steps=3)
    with pytest.raises(ZeroDivisionError, match="from the caller"):
        agentkit.train(config, **callback)
    last = list(read_jsonl(tmp_path / "run" / "events.jsonl"))[-1]
    assert (last["event"], last["error"]) == ("failed", "ZeroDivisionError")
    again: list[int] = []
    result = agentkit.train(tmp_path / "run", resume=True, on_step=lambda step, metrics: again.append(step))
    assert result.finished
    assert again == [2, 3]
    assert [row["step"] for row in result.history] == [1, 2, 3]


async def _asynchronous(*_: object) -> None: ...


@pytest.mark.parametrize("wrong", [3, _asynchronous])
def test_wrong_callbacks_are_refused_at_once(tmp_path: Path, wrong: Any) -> None:
    for name in ("on_step", "on_episode"):
        with pytest.raises(TypeError, match=f"{name}=.* must be a function that is not asynchronous"):
            agentkit.train(small(tmp_path / "run"), **{name: wrong})
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_directory_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = small(Path("run"), steps=1)
    result = agentkit.train(config, on_step=lambda step, metrics: os.chdir(tmp_path / "elsewhere"))
    assert result.directory == tmp_path / "run"
    assert (tmp_path / "run" / "checkpoints" / "step-000001").is_dir()
    assert not any((tmp_path / "elsewhere").iterdir())
    assert agentkit.evaluate(result.directory, episodes=1).episodes == 1


def test_an_evaluation_needs_an_episode() -> None:
    with pytest.raises(ConfigError, match="episodes=0 must be at least 1"):
        agentkit.evaluate("quickstart", env="FrozenLake-v1", episodes=0)


def test_a_voided_episode_is_reported(tmp_path: Path) -> None:
    outcomes: list[str] = []
    agentkit.register("Breaking-v0", f"{__name__}:Breaking")
    env = {"id": "Breaking-v0", "max_turns": 1, "concurrency": "inline"}
    config = small(tmp_path / "run", steps=1, env=env, evaluation={"episodes": 1})
    agentkit.train(config, on_episode=lambda trajectory: outcomes.append(trajectory.outcome))
    recorded = list_episodes(tmp_path / "run" / "episodes.sqlite")
    expected = sorted(row.outcome for row in recorded if row.ending in ("trained", "voided"))
    assert sorted(outcomes) == expected
    assert "voided" in outcomes


class Breaking(agentkit.TextEnv):
    """An environment that fails in every third reset."""

    instructions = "None."
    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        type(self).resets += 1
        if self.resets % 3 == 0:
            raise RuntimeError("broken")
        return "Say anything.", {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(len(action) % 2), True, False, {"success": True, "action_valid": True}


def test_wrong_configurations_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="configuration: lerner: no such key; did you mean learner"):
        agentkit.train(small(tmp_path / "run", lerner={"lr": 1}))
    with pytest.raises(ConfigError, match=r"override 'learner\.lr=x'"):
        agentkit.train(agentkit.load_config(SMALL), overrides=["learner.lr=x"])
    with pytest.raises(ConfigError, match="is not plain data; use numbers, texts"):
        agentkit.load_config(small(tmp_path / "run", name=object()))
    with pytest.raises(ConfigError, match="no such configuration file"):
        agentkit.train(tmp_path / "none.yaml")
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        agentkit.train(small(tmp_path / "none"), resume=True)
    with pytest.raises(ConfigError, match="is not a run directory; add --env"):
        agentkit.evaluate("quickstart")
    assert list(tmp_path.iterdir()) == []


def test_without_the_training_packages_one_error_names_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    message = r"training needs the extra 'train' \(torch not installed\); pip install 'agentkit-rl\[train\]'"
    with pytest.raises(MissingExtra, match=message):
        agentkit.train(small(tmp_path / "run"))
    with pytest.raises(MissingExtra, match=message):
        agentkit.evaluate("quickstart", env="FrozenLake-v1")
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import asyncio, json, sys
import agentkit

config, notebook = json.loads(sys.argv[1]), sys.argv[2] == "notebook"

def main():
    try:
        result = agentkit.train(config, on_step=lambda step, metrics: print("step", step, flush=True))
        print(result.ending, result.steps, flush=True)
    except KeyboardInterrupt as stopped:
        print("interrupted:", stopped, flush=True)

async def cell():
    main()

asyncio.run(cell()) if notebook else main()
"""


def started(directory: Path, kind: str) -> subprocess.Popen[str]:
    config = json.dumps(small(directory, steps=100_000), default=str)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, config, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "step 1\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_ctrl_c_ends_a_run_with_a_checkpoint_and_it_can_be_resumed(tmp_path: Path, kind: str) -> None:
    with started(tmp_path / "run", kind) as process:
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    ending, steps = output.splitlines()[-1].split()
    assert (process.returncode, ending) == (0, "interrupted")
    result = agentkit.train(tmp_path / "run", overrides=[f"steps={int(steps) + 1}"], resume="auto")
    # Other settings than those of the run: a new run beside it.
    assert result.directory == tmp_path / "run-2"
    result = agentkit.train(tmp_path / "run", overrides=[f"steps={int(steps) + 1}"], resume=True)
    assert result.steps == int(steps) + 1
    assert result.finished


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_ctrl_c_twice_cancels_a_run(tmp_path: Path, kind: str) -> None:
    with started(tmp_path / "run", kind) as process:
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    last = output.splitlines()[-1]
    # The step may have ended between the two signals.
    assert last.startswith(("interrupted: stopped; `agentkit run --resume", "interrupted "))
    assert process.returncode == 0
