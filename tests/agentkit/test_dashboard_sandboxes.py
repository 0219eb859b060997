"""What the view of sandboxes is told: hosts, states, failures, and the episodes that sandboxes served."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dashboard_runs import STARTED, make_run, make_sandbox_run
from requiring import require

import agentkit
from agentkit import records
from agentkit.dashboard import queries
from agentkit.dashboard.sandboxes import kind_of, sandboxes
from agentkit.errors import LOSS_REASONS, EngineUnavailable, RunDirectoryError
from agentkit.sandboxes import SandboxPool, telemetry
from agentkit.sandboxes.backends.local.backend import LocalBackend


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    make_sandbox_run(tmp_path / "run").release()
    return sandboxes(tmp_path / "run")


def test_numbers_are_those_of_the_last_step_and_sums_over_all(found: dict[str, Any]) -> None:
    state = found["state"]
    assert {name: state[name] for name in ("step", "busy", "idle", "spares", "standbys")} == {
        "step": 2, "busy": 2, "idle": 1, "spares": 1, "standbys": 2,
    }  # fmt: skip
    totals = found["totals"]
    assert (totals["created"], totals["create_failures"], totals["removed"], totals["recoveries"]) == (7, 1, 2, 5)
    assert totals["removed_by"] == {"canary_failed": 1, "oom": 1}
    assert totals["recovered_by"] == {"new": 1, "spare": 1, "standby": 3}
    assert (totals["lost_s"], totals["longest_s"], totals["hedges"], totals["hedges_won"]) == (2.5, 1.25, 5, 2)


def test_a_sandbox_has_its_failure_its_recoveries_and_its_episodes(found: dict[str, Any]) -> None:
    assert found["number"] == 4
    boxes = {box["sandbox"]: box for box in found["boxes"]}
    assert list(boxes) == ["ak-2", "ak-1", "ak-4", "ak-3"]  # the last one first; nothing is known of the time of ak-3
    first = boxes["ak-1"]
    assert (first["host"], first["state"], first["cause"], first["kind"], first["in_use"]) == (
        "one", "failed", "oom", "memory", True,
    )  # fmt: skip
    assert (first["number"], first["episodes"]) == (2, [1, 2])
    assert (first["first"], first["last"], first["failed_at"]) == (STARTED + 5, STARTED + 10, STARTED + 10)
    assert (first["recovered"], first["recovered_by"], first["recovery_s"]) == (4, {"standby": 3, "new": 1}, 1.25)
    assert (boxes["ak-2"]["cause"], boxes["ak-2"]["in_use"], boxes["ak-2"]["number"]) == ("canary failed", False, 0)
    third = boxes["ak-3"]  # an environment failed in it, but not the sandbox
    assert (third["state"], third["cause"], third["kind"], third["recovered"]) == ("used", "EnvTimeout", "timeout", 1)
    assert (boxes["ak-4"]["episodes"], boxes["ak-4"]["state"], boxes["ak-4"]["host"]) == ([2], "used", "two")


def test_hosts_have_their_state_use_and_failures(found: dict[str, Any]) -> None:
    one, two = found["hosts"]
    assert (one["host"], one["state"], one["sandboxes"], one["cpu"], one["memory"]) == ("one", "up", 3, 0.5, 0.25)
    assert (one["served"], one["failed"], one["recovered"], one["kinds"]) == (1, 1, 5, {"memory": 1})
    assert (two["host"], two["state"], two["reason"], two["since"]) == ("two", "down", "no route to host", STARTED + 22)
    assert (two["served"], two["failed"], two["kinds"]) == (1, 1, {"timeout": 1})


def test_the_history_has_every_event_in_order(found: dict[str, Any]) -> None:
    assert [(row["what"], row["text"]) for row in found["history"]] == [
        ("failed", "oom"),
        ("recovered", "by standby, after oom"),
        ("recovered", "by new, after oom"),
        ("failed", "canary failed while idle"),
        ("host", "up → down: no route to host"),
        ("not created", "EngineUnavailable"),
        ("environment", "by new, after EnvCrashed: no route to host"),
        ("recovered", "by spare, after EnvTimeout"),
        ("omitted", "too many to record: 4 sandbox_lost"),
    ]
    lost, recovered = found["history"][:2]
    assert (lost["meaning"], lost["episodes"]) == (LOSS_REASONS["oom"], None)
    assert (recovered["episodes"], recovered["seconds"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("oom", "memory"),
        ("memory: 95 of 100 in use while idle", "memory"),
        ("hung", "timeout"),
        ("EnvTimeout", "timeout"),
        ("tainted", "taint"),
        ("removed", "kill"),
        ("agent_dead", "kill"),
        ("engine_down", "host"),
        ("EnvCrashed", "other"),
    ],
)
def test_the_kind_of_a_cause(cause: str, kind: str) -> None:
    assert kind_of(cause) == kind


def test_runs_without_sandboxes_older_and_damaged_ones(tmp_path: Path) -> None:
    make_run(tmp_path / "none").release()
    nothing = sandboxes(tmp_path / "none")
    assert (nothing["state"], nothing["hosts"], nothing["boxes"], nothing["history"]) == (None, [], [], [])
    make_sandbox_run(tmp_path / "old").release()
    with sqlite3.connect(tmp_path / "old" / "episodes.sqlite") as db:
        db.execute("alter table episodes drop column sandboxes")
    db.close()
    assert {box["number"] for box in sandboxes(tmp_path / "old")["boxes"]} == {0}
    make_sandbox_run(tmp_path / "damaged").release()
    with sqlite3.connect(tmp_path / "damaged" / "episodes.sqlite") as db:
        db.execute("update episodes set sandboxes = '[[' where id = 1")
    db.close()
    with pytest.raises(RunDirectoryError, match="malformed JSON"):
        sandboxes(tmp_path / "damaged")


def test_an_episode_names_its_sandboxes(tmp_path: Path) -> None:
    make_sandbox_run(tmp_path / "run").release()
    assert queries.episode(tmp_path / "run", 2, None)["sandboxes"] == [["one", "ak-1"], ["two", "ak-4"]]
    _, trajectory = records.read_episode(tmp_path / "run" / "episodes.sqlite", 2)
    assert trajectory.sandboxes == (("one", "ak-1"), ("two", "ak-4"))


@pytest.mark.slow
def test_a_real_run_whose_sandboxes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    asyncio.run(_need_bubblewrap())
    removed: list[str] = []
    removals: list[asyncio.Future[None]] = []

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        (pool,) = telemetry.open_pools()
        assert isinstance(pool, SandboxPool)
        for box in pool.sandboxes("busy") if step == 1 else ():
            removed.append(box.id)
            removals.append(asyncio.ensure_future(box.backend.remove(box.id)))

    settings: dict[str, Any] = {
        "steps": 4,
        "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "sandbox": "local", "sandbox_share": 2, "max_turns": 3},
        "engine": {"max_context": 256, "max_batch": 8},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6, "async_ratio": 1.0},
        "learner": {"lr": 1e-3},
        "evaluation": {"episodes": 2},
        "dir": str(tmp_path / "run"),
    }
    agentkit.train(settings, on_step=on_step)
    shown = sandboxes(tmp_path / "run")
    boxes = {box["sandbox"]: box for box in shown["boxes"]}
    failed = {id for id, box in boxes.items() if box["state"] == "failed"}
    assert removed
    assert failed == set(removed)
    assert {boxes[id]["kind"] for id in failed} == {"kill"}
    assert shown["totals"]["recoveries"] == sum(box["recovered"] for box in boxes.values())
    rows = list(records.iterate_trajectories(tmp_path / "run" / "episodes.sqlite"))
    served = {id: [] for id in boxes}
    for row, trajectory in rows:
        assert trajectory.sandboxes or row.ending == "cancelled"
        for _, id in trajectory.sandboxes:
            served[id].append(row.id)
    assert {id: box["number"] for id, box in boxes.items()} == {id: len(ids) for id, ids in served.items()}
    assert all(served[id][-30:] == box["episodes"] for id, box in boxes.items())
    (host,) = shown["hosts"]
    assert 0 < host["memory"] < 1
    assert host["failed"] == len(removed)


async def _need_bubblewrap() -> None:
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    await backend.close()
