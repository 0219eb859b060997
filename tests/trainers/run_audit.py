"""Audit the records of a run: every group has exactly one end, and there are no other records."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from agentkit.config import RunConfig, attempts
from agentkit.records import iterate_trajectories


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def audit(run: Path, config: RunConfig) -> dict[str, int]:
    """Assert that the records of a finished run account for every group exactly once; returns what was counted."""
    _check_metrics(run, config)
    _check_leftovers(run, config)
    with sqlite3.connect(f"file:{run / 'episodes.sqlite'}?mode=ro", uri=True) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        columns = "step, ending, ending_reason, group_id, member, seed, version_started"
        rows = database.execute(f"select {columns} from episodes where ending <> 'eval'").fetchall()
        query = "select step, seed, outcome from episodes where ending = 'eval'"
        evaluated = database.execute(query).fetchall()
    database.close()
    _check_evaluations(evaluated, config)
    groups: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        groups[row[3]].append(row)

    # The cursor: no id is left out, and each has the task that belongs to it.
    assert sorted(groups) == list(range(len(groups))), "ids of groups are missing"
    for group, members in groups.items():
        tasks = config.env.num_tasks
        expected = config.env.first_seed + (group % tasks if tasks else group)
        assert {row[5] for row in members} == {expected}, f"group {group} has another task's seed"

    trained_in: Counter[int] = Counter()
    endings: Counter[str] = Counter()
    for group, members in groups.items():
        final = [row for row in members if not _is_of_a_member_alone(row)]
        kinds = {row[1] for row in final} or {"voided"}
        assert len(kinds) == 1, f"group {group} ended in several ways: {members}"
        (kind,) = kinds
        endings[kind] += 1
        if kind != "trained":
            assert len({row[0] for row in final}) <= 1, f"group {group} ended more than once: {members}"
            continue
        steps = {row[0] for row in final}
        assert len(steps) == 1, f"group {group} was trained on in steps {sorted(steps)}"
        assert len(final) == len({row[4] for row in final}) == config.rollout.group_size, f"group {group}: {final}"
        (step,) = steps
        trained_in[step] += 1
        for row in final:
            assert 0 <= step - 1 - row[6] <= math.ceil(config.rollout.async_ratio), f"group {group} was too old"
    assert trained_in == dict.fromkeys(range(1, config.steps + 1), config.rollout.groups)
    _check_versions(run)
    return dict(endings)


def _check_versions(run: Path) -> None:
    """The tokens of an episode have the versions from its start on, in order, and none that was not trained yet."""
    for row, played in iterate_trajectories(run / "episodes.sqlite"):
        if row.ending == "eval":
            continue
        versions = [played.version_started, *(version for turn in played.turns for version, _ in turn.versions)]
        assert versions == sorted(versions), f"group {played.group_id} has versions {versions}"
        # Engines serve the version of a step shortly before the step ends. What is trained on in it is older.
        newest = row.step - (row.ending == "trained")
        assert versions[-1] <= newest, f"group {played.group_id} of step {row.step} has versions {versions}"


def _check_evaluations(rows: list[tuple[Any, ...]], config: RunConfig) -> None:
    """Before and after training, each seed has one episode with a result, or every attempt failed."""
    first = config.evaluation.first_seed
    expected = range(first, first + config.evaluation.episodes)
    assert {row[0] for row in rows} == {0, config.steps}
    for step in (0, config.steps):
        valid = [row[1] for row in rows if row[0] == step and row[2] != "voided"]
        failed = Counter(row[1] for row in rows if row[0] == step and row[2] == "voided")
        assert len(valid) == len(set(valid)), f"seeds that were evaluated twice at step {step}: {valid}"
        lost = [seed for seed in expected if seed not in valid]
        assert set(valid) | set(failed) == set(expected), f"evaluation at step {step}: {sorted(valid)}"
        assert all(failed[seed] == attempts(config) for seed in lost), f"evaluation at step {step}: {failed}"


def _is_of_a_member_alone(row: tuple[Any, ...]) -> bool:
    """Return whether the group continued without it: a redundant member, or an attempt whose environment failed."""
    ending, reason = row[1], row[2]
    return (ending, reason) == ("cancelled", "redundant_member") or (ending == "voided" and reason != "group")


def _check_metrics(run: Path, config: RunConfig) -> None:
    lines = read_lines(run / "metrics.jsonl")
    steps = [line["step"] for line in lines if "time/step" in line]
    assert steps == list(range(1, config.steps + 1)), f"training steps in metrics.jsonl: {steps}"
    # Measuring again after the last step is harmless, and shows.
    evaluations = [line["step"] for line in lines if "eval/success" in line]
    assert [step for step in evaluations if step != config.steps] == [0], f"evaluations in metrics.jsonl: {evaluations}"
    assert evaluations[-1] == config.steps


def _check_leftovers(run: Path, config: RunConfig) -> None:
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(checkpoints) <= config.checkpoint.keep
    assert checkpoints[-1] == f"step-{config.steps:06d}"
    assert all(name.startswith("step-") for name in checkpoints), checkpoints
    assert (run / "model").resolve() == (run / "checkpoints" / checkpoints[-1] / "model").resolve()
    assert not list(run.rglob("*.partial*"))
