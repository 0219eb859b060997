"""What the pipeline view is told about learner, engines, environments and gate."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_runs import STARTED, make_pipeline_run, make_run

import agentkit
from agentkit.dashboard import pipeline as asked
from agentkit.dashboard.pipeline import pipeline
from agentkit.errors import RunDirectoryError
from agentkit.jsonl import JsonlWriter


def test_the_mean_number_is_that_of_a_count_at_many_moments() -> None:
    rng = np.random.default_rng(0)
    starts = 1.8e9 + rng.uniform(0, 50, 40)
    ends, weights = starts + rng.uniform(0, 20, 40), rng.uniform(0, 1, 40)
    begins = 1.8e9 + np.array([0.0, 10.0, 30.0, 95.0, 20.0])
    until = 1.8e9 + np.array([10.0, 30.0, 90.0, 96.0, 20.0])
    counted = []
    for begin, end in zip(begins, until, strict=True):
        moments = begin + (np.arange(20_000) + 0.5) / 20_000 * (end - begin)
        inside = (starts[:, None] <= moments) & (moments < ends[:, None])
        counted.append((weights[:, None] * inside).sum(0).mean() if end > begin else 0.0)
    np.testing.assert_allclose(asked.mean_number(starts, ends, weights, begins, until), counted, atol=2e-3)


def test_who_waited_for_whom(tmp_path: Path) -> None:
    """Each step waits 1 s for the episodes of the second group, trains 2 s and publishes 1 s."""
    make_pipeline_run(tmp_path / "run").release()
    found = pipeline(tmp_path / "run")
    steps = found["steps"]
    assert steps["step"] == [1, 2, 3]
    assert [steps[name][1] - STARTED for name in ("began", "got", "trained", "ended")] == [4.0, 5.0, 7.0, 8.0]
    # In step 2, two of its own episodes last for a second, and two of step 3 for the last second.
    assert steps["generating"][1] == pytest.approx((2 * 1.5 / 3 + 2 * 1.5 / 3) / 4)
    assert steps["environment"][1] == pytest.approx((2 * 0.75 / 3 + 2 * 0.75 / 3) / 4)
    assert steps["waiting"][1] == pytest.approx(steps["environment"][1])
    assert steps["ready"][1] == pytest.approx(1 / 4)  # the first group, for 1 s
    assert steps["ready_s"] == pytest.approx([0.5, 0.5, 0.5])
    recent = found["recent"]
    assert recent["steps"] == 3
    assert recent["learner"] == pytest.approx({"waiting": 3.0, "training": 6.0, "publishing": 3.0, "other": 2.0})
    assert recent["engines"] == pytest.approx(0.6)
    share = recent["episodes"]
    assert share["generating"] == pytest.approx(2 * share["environment"])
    assert found["verdict"] == (
        "Within steps, the learner waits for episodes in 25 % of its time; episodes spend 50 % of theirs in generation."
    )


def test_time_between_two_sessions_is_not_the_learners() -> None:
    lines = [
        {"step": step, "time": time, "time/step": 2.0, "time/wait": 0.1, "time/train": 1.0}
        for step, time in ((1, 10.0), (2, 13.0), (3, 100.0))
    ]
    steps = asked.step_times(lines)
    steps |= asked.activity(steps, np.zeros((0, 4)), np.zeros((0, 2)))
    recent = asked.shares(steps, lines, [0.0, 90.0])
    assert recent["learner"] == pytest.approx({"waiting": 0.3, "training": 3.0, "publishing": 2.7, "other": 1.0})
    assert (recent["episodes"], recent["engines"], recent["ready"]) == (None, None, None)
    expected = "Within steps, the learner waits for episodes in 5 % of its time, so it sets the pace."
    assert asked.verdict(recent) == expected
    assert asked.verdict(asked.shares({name: [] for name in steps}, [], [])) == ""


def test_the_gate_its_staleness_and_what_was_not_used(tmp_path: Path) -> None:
    make_pipeline_run(tmp_path / "run").release()
    found = pipeline(tmp_path / "run")
    assert found["gate"] == {
        "policy": "drop", "batch": 2, "async_ratio": 1.5, "extra": 1, "capacity": 6, "max_staleness": 2, "step": 3,
        "running": 3.0, "ready": 1.0,
    }  # fmt: skip
    assert found["staleness"] == pytest.approx([0.5, 1 / 3, 1 / 6])
    endings = [(one["ending"], one["reason"], one["episodes"], one["tokens"]) for one in found["endings"]]
    assert endings == [
        ("trained", "", 12, pytest.approx(4.0)),
        ("dropped", "zero_signal", 2, pytest.approx(5.0)),
        ("cancelled", "shutdown", 1, pytest.approx(5.0)),
    ]
    groups = found["groups"]
    assert {name: groups[name] for name in ("groups", "equal", "solved", "unsolved")} == {
        "groups": 7, "equal": 4, "solved": 1, "unsolved": 3,
    }  # fmt: skip
    assert [(one["step"], one["group_id"], one["ending"], one["solved"]) for one in groups["latest"]] == [
        (3, 50, "dropped", 2), (3, 5, "trained", 0), (2, 3, "trained", 0), (1, 1, "trained", 0),
    ]  # fmt: skip


def test_engines_roles_nodes_and_events(tmp_path: Path) -> None:
    make_pipeline_run(tmp_path / "run").release()
    found = pipeline(tmp_path / "run")
    first, second, third = found["engines"]
    assert (first["state"], first["tokens_per_s"], first["reused_share"], first["behind"]) == ("serving", 30.0, 0.5, 0)
    assert (second["state"], second["cause"], second["behind"], second["since"]) == (
        "replaced", "it did not answer", 1, STARTED + 9.5,
    )  # fmt: skip
    assert (third["state"], third["restarts"]) == ("serving", 1)  # it was lost before the run was resumed
    roles = [(one["role"], one["index"], one["host"], one["pid"], one["placed"]) for one in found["roles"]]
    assert roles == [("learner", 0, "first", 11, 1), ("engine", 0, "first", 12, 1), ("engine", 1, "second", 14, 2)]
    assert found["nodes"] == [
        {"host": "first", "roles": {"learner": 1, "engine": 1}, "sandboxes": None},
        {"host": "second", "roles": {"engine": 1}, "sandboxes": None},
        {"host": "third:8765", "roles": {}, "sandboxes": 5.0},
    ]
    assert [event["text"] for event in found["events"]][-3:] == [
        "resumed after step 1",
        "engine 1 was lost: it did not answer",
        "step 3 had no signal: all returns are equal",
    ]


def test_a_run_without_steps_and_one_of_an_older_version(tmp_path: Path) -> None:
    make_run(tmp_path / "empty", done=0).release()
    found = pipeline(tmp_path / "empty")
    assert (found["steps"]["step"], found["engines"], found["verdict"], found["staleness"]) == ([], [], "", [])
    assert found["groups"]["latest"] == []
    make_pipeline_run(tmp_path / "old").release()
    with sqlite3.connect(tmp_path / "old" / "episodes.sqlite") as db:
        for column in ("action_tokens", "ended_at"):
            db.execute(f"alter table episodes drop column {column}")
    db.close()
    found = pipeline(tmp_path / "old")
    assert found["steps"]["ready"] == [None] * 3
    assert found["recent"]["episodes"] is None
    assert [one["tokens"] for one in found["endings"]] == [None] * 3


def test_a_damaged_run_is_an_error_and_odd_records_are_not(tmp_path: Path) -> None:
    make_pipeline_run(tmp_path / "odd").release()
    writer = JsonlWriter(tmp_path / "odd" / "metrics.jsonl")
    writer.write({"step": 4, "time": STARTED + 30, "time/step": None, "staleness/mean": None})
    writer.close()
    (tmp_path / "odd" / "config.yaml").write_text("rollout: {groups: many, async_ratio: [1]}\n")
    found = pipeline(tmp_path / "odd")
    assert (found["steps"]["step"], found["gate"]["capacity"], found["gate"]["batch"]) == ([1, 2, 3], None, "many")
    make_pipeline_run(tmp_path / "damaged").release()
    (tmp_path / "damaged" / "episodes.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        pipeline(tmp_path / "damaged")


def test_a_real_run_records_what_the_view_shows(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "steps": 3,
        "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 3},
        "engine": {"replicas": 2, "max_context": 256, "max_batch": 8},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6, "async_ratio": 1.0},
        "learner": {"lr": 1e-3},
        "evaluation": {"episodes": 2},
        "dir": str(tmp_path / "run"),
    }
    result = agentkit.train(settings)
    found = pipeline(tmp_path / "run")
    assert found["steps"]["step"] == [1, 2, 3]
    for name in ("generating", "ready", "ready_s"):
        assert all(value is not None and value >= 0 for value in found["steps"][name])
    assert sum(found["steps"]["generating"]) > 0
    for times in zip(*(found["steps"][name] for name in ("began", "got", "trained", "ended")), strict=True):
        assert list(times) == sorted(times)
    for row in result.history:
        assert row["gate/running"] + row["gate/ready"] == found["gate"]["capacity"]
        assert 0 <= row["engine/1/reused_share"] <= 1
        busy = sum(row[f"engine/{index}/busy_share"] for index in range(2))
        assert busy > 0
    assert [(one["role"], one["index"]) for one in found["roles"]] == [("learner", 0), ("engine", 0), ("engine", 1)]
    assert [one["state"] for one in found["engines"]] == ["serving"] * 2
    assert len(found["nodes"]) == 1
