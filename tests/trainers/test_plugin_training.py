"""A separately installed package provides the estimator, the loss, the reward, the filter and the parser of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from requiring import require

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROJECT = """
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "fair-credit"
version = "1.0"

[project.entry-points."agentkit.advantages"]
fair = "fair_credit.parts:fair"

[project.entry-points."agentkit.losses"]
plain = "fair_credit.parts:plain"

[project.entry-points."agentkit.rewards"]
brief = "fair_credit.parts:brief"

[project.entry-points."agentkit.filters"]
some = "fair_credit.parts:some"

[project.entry-points."agentkit.parsers"]
first-word = "fair_credit.parts:FirstWord"
"""
PARTS = """
import numpy as np

from agentkit.plugins import advantage, loss
from agentkit.trainers.algorithms.advantages import episode_returns
from agentkit.trainers.rollout.parser import ParsedAnswer


@advantage(group_baseline=True)
def fair(batch, values, config, *, power: float = 1.0):
    returns = episode_returns(batch)
    group = np.unique(batch.group_ids, return_inverse=True)[1]
    above = returns - (np.bincount(group, weights=returns) / np.bincount(group))[group]
    return (np.sign(above) * np.abs(above) ** power)[batch.sequence_ids]


@loss(needs=["behaviour"])
def plain(inputs, config, *, power: float = 1.0):
    ratio = (inputs.logprobs["policy"] - inputs.logprobs["behaviour"]).clamp(-20, 20).exp()
    return -ratio * inputs.advantages


def brief(episode, *, cost: float):
    return [turn.reward - cost * (1 + int(turn.action_ids.sum()) % 7) for turn in episode.turns]


def some(group):
    return any(member.num_action_tokens for member in group.members)


class FirstWord:
    instructions = "Begin your answer with your action."

    def __init__(self, actions_per_turn):
        pass

    def parse(self, text):
        words = text.split()
        return ParsedAnswer(tuple(words[:1]), valid=bool(words))
"""
RUN = [
    "env.parser=first-word", "rollout.reward=brief", "rollout.reward_options.cost=0.01", "rollout.filter=some",
    "algorithm.advantage=fair", "algorithm.loss=plain", "algorithm.options.power=0.5", "algorithm.kl=none",
]  # fmt: skip
SMALL = [
    "steps=2", "env.kwargs.size=2", "env.max_turns=2", "engine.max_context=256", "engine.max_batch=8",
    "rollout.groups=2", "rollout.group_size=2", "rollout.max_tokens=6", "learner.lr=1e-3", "evaluation.episodes=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which pip installed the package; agentkit's own environment does not know it."""
    root = tmp_path_factory.mktemp("fair")
    (root / "source" / "fair_credit").mkdir(parents=True)
    (root / "source" / "pyproject.toml").write_text(PROJECT)
    (root / "source" / "fair_credit" / "__init__.py").write_text("")
    (root / "source" / "fair_credit" / "parts.py").write_text(PARTS)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(root / "installed")]
    subprocess.run([*pip, *options, str(root / "source")], check=True, timeout=280)
    return root / "installed"


def agentkit(place: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "agentkit", *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip


def write_config(folder: Path) -> str:
    (folder / "run.yaml").write_text("env: {id: FrozenLake-v1}\ndir: out\n")
    return "run.yaml"


@pytest.mark.parametrize("placement", ["inline", "cluster"])
def test_an_installed_estimator_trains(place: Path, tmp_path: Path, placement: str) -> None:
    where = {"inline": [], "cluster": ["cluster={}", "learner.ranks=2"]}
    if placement == "cluster":
        require("ray", "pip install 'agentkit-rl[ray]'")
    result = agentkit(place, "run", write_config(tmp_path), *SMALL, *RUN, *where[placement], cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row]
    assert len(steps) == 2
    assert all(row["policy/grad_norm"] > 0 for row in steps)
    assert all(row["rollout/return_mean"] < row["task/env_return"] for row in steps)


def test_the_command_lists_and_checks_installed_parts(place: Path, tmp_path: Path) -> None:
    listed = agentkit(place, "algorithm", "list", "--kind", "advantage", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "fair-credit 1.0" in listed.stdout
    checked = agentkit(place, "algorithm", "check", "plain", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "10 of 10 rules are kept" in checked.stdout


def test_an_error_in_a_plugin_ends_the_run_with_one_error_and_keeps_the_last_step(place: Path, tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(
        "count = 0\n"
        "def fails(episode):\n"
        "    global count\n"
        "    count += 1\n"
        "    if count > 6:\n"
        "        raise OSError('the word list is gone')\n"
        "    return [turn.reward for turn in episode.turns]\n"
    )
    settings = [*SMALL, "steps=9", "rollout.reward=later:fails", "checkpoint.every=0"]
    result = agentkit(tmp_path, "run", write_config(tmp_path), *settings, cwd=tmp_path)
    assert result.returncode == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    (error,) = errors
    assert "reward 'later:fails' raised OSError: the word list is gone (in fails, " in error
    assert "Traceback" not in result.stderr
    (tmp_path / "later.py").write_text("def fails(episode):\n    return [turn.reward for turn in episode.turns]\n")
    resumed = agentkit(tmp_path, "run", "--resume", "out", "steps=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after step 1" in resumed.stdout
