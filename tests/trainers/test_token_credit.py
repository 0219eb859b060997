"""What a run records of each token's credit is what its learner used."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_runs import episode, make_run
from requiring import require

import agentkit
from agentkit import records
from agentkit.config import RunConfig
from agentkit.dashboard.credit import token_credit
from agentkit.envs.base import TextEnv
from agentkit.records import Filter, TokenCredit, read_credit
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder
from agentkit.types import FloatArray

LONG = {"groups": 2, "group_size": 2, "max_tokens": 24}
"""A token's influence is read from tokens at least ten later."""


class Lengths(TextEnv):
    """One step; the reward depends on the length of the answer."""

    instructions = "Say anything."
    max_turns = 1
    concurrency = "inline"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "go", {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "done", len(action) % 7 / 6, True, False, {"success": False, "action_valid": True}


def play(directory: Path, **changes: Any) -> list[tuple[records.EpisodeRow, int, dict[str, FloatArray]]]:
    """Run two small steps; return each episode that was trained on, its number of action tokens, and its credit."""
    settings: dict[str, Any] = {
        "dir": directory,
        "steps": 2,
        "env": {"id": "Lengths-v0", "parser": "plain"},
        "engine": {"max_context": 256, "max_batch": 8},
        "rollout": {"groups": 2, "group_size": 4, "max_tokens": 8},
        "evaluation": {"episodes": 2},
        "learner": {"lr": 1e-3},
    }
    agentkit.register("Lengths-v0", Lengths)
    agentkit.train(RunConfig.model_validate(settings | changes), resume=False)
    run, found = RunDirectory(directory), []
    for row, trajectory in records.iterate_trajectories(run.episodes_file, ending="trained"):
        credit = read_credit(run.episodes_file, row)
        assert credit is not None
        assert {len(column) for column in credit.values()} == {trajectory.num_action_tokens}
        found.append((row, trajectory.num_action_tokens, credit))
    assert {row.step for row, _, _ in found} == {1, 2}
    assert read_credit(run.episodes_file, records.list_episodes(run.episodes_file, Filter(ending="eval"))[0]) is None
    return found


def test_advantages_are_those_of_the_returns_of_each_group(tmp_path: Path) -> None:
    found = play(tmp_path / "run")
    signals = set()
    for row, number, credit in found:
        assert set(credit) == {"advantage", "weight"}
        group = [other.reward for other, _, _ in found if other.group_id == row.group_id]
        expected = (row.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        assert credit["advantage"] == pytest.approx([expected] * number, abs=1e-5)
        assert set(credit["weight"]) <= {1.0}
        signals.add(round(expected, 3))
    assert len(signals) > 2, "some group has a signal"


def test_values_of_critics_explain_the_advantages(tmp_path: Path) -> None:
    """With gamma and lambda 1, ``A_t - A_s = (V_s - V_t) / std`` within an episode: the reward is at its end."""
    critic = {"count": 2, "layers": 1, "hidden_size": 16, "lr": 1e-2}
    found = play(tmp_path / "run", algorithm={"advantage": "gae", "lam": 1.0, "gamma": 1.0}, critic=critic)
    for step in (1, 2):
        advantages, values = [], []
        for row, _, credit in found:
            if row.step == step:
                both = np.stack([credit["value_0"], credit["value_1"]])
                assert step == 1 or np.abs(both[0] - both[1]).max() > 0
                assert credit["disagreement"] == pytest.approx(both.std(axis=0), rel=1e-4, abs=1e-6)
                advantages.append(np.diff(credit["advantage"]))
                values.append(-np.diff(both.mean(axis=0)))
        change, explained = np.concatenate(advantages), np.concatenate(values)
        if step == 1:  # a critic begins with the value 0 for every state
            assert not explained.any()
            assert change == pytest.approx(0, abs=1e-5)
            continue
        scale = change @ explained / (explained @ explained)
        assert scale > 0
        assert change == pytest.approx(scale * explained, abs=1e-4 * float(scale))
        assert np.abs(explained).max() > 1e-3


@pytest.mark.parametrize("placement", ["here", pytest.param("two ranks", marks=pytest.mark.slow)])
def test_attention_rhythm_is_recorded_with_its_factor(tmp_path: Path, placement: str) -> None:
    """Of several ranks in a cluster, each computes a part; the record has every token of every episode once."""
    where: dict[str, Any] = {}
    if placement == "two ranks":
        require("ray", "pip install 'agentkit-rl[ray]'")
        where = {"cluster": {}, "learner": {"lr": 1e-3, "ranks": 2}}
    found = play(tmp_path / "run", algorithm={"credit": "coupled"}, rollout=LONG, **where)
    with sqlite3.connect(tmp_path / "run" / "episodes.sqlite") as db:
        recorded = db.execute("select step, group_id, member from credit").fetchall()
    db.close()
    assert sorted(recorded) == sorted((row.step, row.group_id, row.member) for row, _, _ in found)
    marked = set()
    for row, number, credit in found:
        assert {"waad", "fai", "factor", "marks"} <= set(credit)
        local, anchor, dependent, introducing = (credit["marks"].astype(int) >> bit & 1 for bit in range(4))
        weight = anchor * (1 - dependent) + 0.6 * dependent + 0.4 * introducing
        assert credit["factor"] == pytest.approx(1 + 0.5 * weight)  # amplified by 1.5
        group = [other.reward for other, _, _ in found if other.group_id == row.group_id]
        expected = (row.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        assert credit["advantage"] == pytest.approx(expected * credit["factor"], abs=1e-5)
        marked |= set(credit["factor"].tolist())
        shown = token_credit(tmp_path / "run", row.id)
        assert shown["factor"] == pytest.approx(credit["factor"].tolist())
        assert [("L" in letters, "A" in letters) for letters in shown["marks"]] == [
            (bool(one), bool(other)) for one, other in zip(local, anchor, strict=True)
        ]
        assert len(shown["advantages"]) == number
    assert len(marked) > 1


def test_a_roll_back_removes_the_credit_of_later_steps(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", done=0)
    columns = {"advantage": np.array([0.5, -1.0], np.float32), "weight": np.ones(2, np.float32)}
    with Recorder(directory) as recorder:
        for step in (1, 2):
            recorder.episode(step, episode(step, 0, 1.0), "trained")
            recorder.credit([TokenCredit(step, step, 0, columns)])
        recorder.flush()
        rows = records.list_episodes(directory.episodes_file, Filter(ending="trained"))
        assert all(read_credit(directory.episodes_file, row) is not None for row in rows)
        recorder.rollback(1)
        first, second = (read_credit(directory.episodes_file, row) for row in rows)
        assert first is not None
        assert first["advantage"].tolist() == [0.5, -1.0]
        assert second is None
    directory.release()


def test_files_of_older_versions_have_no_credit_and_can_be_continued(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", done=1)
    directory.release()
    with sqlite3.connect(directory.episodes_file) as db:
        db.execute("drop table credit")
    db.close()
    row = records.list_episodes(directory.episodes_file, Filter(ending="trained"))[0]
    assert read_credit(directory.episodes_file, row) is None
    assert token_credit(directory.path, row.id)["advantages"] is not None, "estimated again"
    with Recorder(RunDirectory(directory.path)) as recorder:
        columns = {"advantage": np.array([3.0], np.float32), "weight": np.ones(1, np.float32)}
        recorder.credit([TokenCredit(row.step, row.group_id, row.member, columns)])
    assert token_credit(directory.path, row.id)["advantages"] == [3.0]
