"""Records: complete and exact, written without blocking the caller, and rolled back to exactly one step."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentkit import records
from agentkit.codec import decode_trajectory, encode_trajectory
from agentkit.config_io import parse_config
from agentkit.errors import RunDirectoryError
from agentkit.jsonl import JsonlWriter, read_jsonl
from agentkit.records import Filter
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder
from agentkit.types import Trajectory, Turn


@pytest.fixture
def directory(tmp_path: Path):
    made = RunDirectory.create(parse_config("env: {id: FrozenLake-v1}", [f"dir={tmp_path / 'run'}"]))
    yield made
    made.release()


def episode(group: int, reward: float = 1.0) -> Trajectory:
    turn = Turn(
        np.arange(30, dtype=np.int32),
        np.arange(4, dtype=np.int32),
        np.full(4, -0.5, np.float32),
        ((group, 4),),
        reward=reward,
    )
    return Trajectory(group, 0, "FrozenLake-v1", 7, group, turns=[turn, turn], success=reward > 0, duration_s=0.25)


def test_everything_reads_back(directory: RunDirectory) -> None:
    with Recorder(directory) as recorder:
        for step in range(3):
            recorder.metrics(step, {"rollout/success": step / 2, "policy/loss": float("nan")})
            recorder.episode(step, episode(step), "trained")
        recorder.episode(2, episode(9, -1.0), "dropped", "stale")
        recorder.event("started", pid=1, where=Path("x"), share=np.float32(0.5))
    rows = records.list_episodes(directory.episodes_file)
    assert [(row.step, row.group_id, row.ending, row.ending_reason) for row in rows] == [
        (0, 0, "trained", ""),
        (1, 1, "trained", ""),
        (2, 2, "trained", ""),
        (2, 9, "dropped", "stale"),
    ]
    assert (rows[0].reward, rows[0].turns, rows[0].tokens, rows[0].success) == (2.0, 2, 68, True)
    row, trajectory = records.read_episode(directory.episodes_file, rows[3].id)
    assert row == rows[3]
    assert encode_trajectory(trajectory) == encode_trajectory(episode(9, -1.0))
    lines = list(read_jsonl(directory.metrics_file))
    assert [line["rollout/success"] for line in lines] == [0.0, 0.5, 1.0]
    assert lines[0]["policy/loss"] is None
    (event,) = read_jsonl(directory.events_file)
    assert (event["event"], event["pid"], event["where"], event["share"]) == ("started", 1, "x", 0.5)


def test_a_reason_may_contain_lone_surrogates(directory: RunDirectory) -> None:
    voided = episode(1)
    voided.outcome, voided.reason = "voided", "EnvCrashed: \ud800"
    with Recorder(directory) as recorder:
        recorder.episode(1, voided, "voided", "\udfff")
    row, trajectory = records.read_episode(directory.episodes_file, 1)
    assert (row.reason, row.ending_reason) == ("EnvCrashed: \\ud800", "\\udfff")
    assert trajectory.reason == voided.reason


def test_lists_can_be_filtered_and_limited(directory: RunDirectory) -> None:
    with Recorder(directory) as recorder:
        for step in range(5):
            recorder.episode(step, episode(step), "trained" if step % 2 else "dropped")
    path = directory.episodes_file
    assert [row.step for row in records.list_episodes(path, Filter(ending="trained"))] == [1, 3]
    assert [row.step for row in records.list_episodes(path, last=2)] == [3, 4]
    assert [row.step for row in records.list_episodes(path, Filter(step=2))] == [2]
    assert [trajectory.group_id for _, trajectory in records.iterate_trajectories(path, ending="dropped")] == [0, 2, 4]
    with pytest.raises(RunDirectoryError, match="has no episode 77; it contains 1 to 5"):
        records.read_episode(path, 77)


def test_lists_can_be_filtered_and_sorted(directory: RunDirectory) -> None:
    rewards = [0.5, -1.0, 2.0, 0.0]
    with Recorder(directory) as recorder:
        for number, reward in enumerate(rewards):
            played = episode(number, reward / 2)  # two turns
            if reward < 0:
                played.outcome, played.reason = "voided", "EnvCrashed: the ICE broke"
            elif reward > 1:
                played.outcome, played.reason = "truncated", "the ice is long"
            recorder.episode(0, played, "eval" if number % 2 else "trained")
    path = directory.episodes_file

    def groups(**options: Any) -> list[int]:
        wanted = Filter(**{key: options.pop(key) for key in tuple(options) if key in Filter.__dataclass_fields__})
        return [row.group_id for row in records.list_episodes(path, wanted, **options)]

    assert groups(order="reward") == [1, 3, 0, 2]
    assert groups(order="reward", last=2) == [0, 2]
    assert groups(order="reward", reverse=True) == [2, 0, 3, 1]
    assert groups(order="reward", reverse=True, last=2) == [3, 1]
    assert groups(min_reward=0.0, max_reward=0.5) == [0, 3]
    assert groups(outcome="truncated") == [2]
    assert groups(error="the ice") == [1]
    assert groups(error="") == [1]
    assert groups(error="fire") == []
    assert groups(ending="eval", min_reward=0.0) == [3]
    assert groups(env_id="FrozenLake-v1", step=0) == [0, 1, 2, 3]
    assert groups(env_id="Sokoban-v0") == []


def test_a_repeated_evaluation_replaces_the_first(directory: RunDirectory) -> None:
    def rows() -> list[tuple[int, str, int]]:
        found = records.list_episodes(directory.episodes_file)
        return [(row.step, row.ending, row.group_id) for row in found]

    with Recorder(directory) as recorder:
        for step in (0, 2):
            recorder.begin_evaluation(step)
            recorder.episode(step, episode(1), "eval")
            recorder.metrics(step, {"eval/success": 1.0})
        recorder.episode(2, episode(7), "trained")
        recorder.begin_evaluation(2)
        recorder.episode(2, episode(3), "eval")
        recorder.metrics(2, {"eval/success": 0.5})
    assert rows() == [(0, "eval", 1), (2, "trained", 7), (2, "eval", 3)]
    measured = [(row["step"], row["eval/success"]) for row in read_jsonl(directory.metrics_file)]
    assert measured == [(0, 1.0), (2, 0.5)]


@pytest.mark.parametrize("measured", [True, False])
def test_rollback_keeps_only_complete_evaluations_of_its_step(directory: RunDirectory, measured: bool) -> None:
    with Recorder(directory) as recorder:
        for step in (1, 2, 3):
            recorder.metrics(step, {"policy/loss": 0.0})
            recorder.episode(step, episode(step), "trained")
            recorder.episode(step, episode(step + 10), "eval")
            if step != 2 or measured:
                recorder.metrics(step, {"eval/success": 1.0})
        recorder.rollback(2)
    found = [(row.step, row.ending) for row in records.list_episodes(directory.episodes_file)]
    assert found == [(1, "trained"), (1, "eval"), (2, "trained")] + [(2, "eval")] * measured


def test_trajectories_of_older_records_read_back_without_a_system_message() -> None:
    new = episode(1)
    new.system = "Rules."
    assert decode_trajectory(encode_trajectory(new)).system == "Rules."
    data = encode_trajectory(new)
    header = zlib.decompress(data[4:]).replace(b',"system":"Rules."', b"")
    old = struct.pack("<I", struct.unpack_from("<I", header)[0] - len(b',"system":"Rules."')) + header[4:]
    read = decode_trajectory(data[:4] + zlib.compress(old))
    assert (read.system, read.group_id, len(read.turns)) == ("", 1, 2)


def test_readers_see_a_run_that_is_going_on(directory: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="no episode yet"):
        records.list_episodes(directory.episodes_file)
    with Recorder(directory) as recorder:
        recorder.episode(0, episode(0), "trained")
        recorder.flush()
        assert len(records.list_episodes(directory.episodes_file)) == 1
        recorder.episode(0, episode(1), "trained")
        deadline = time.monotonic() + 10
        while len(records.list_episodes(directory.episodes_file)) < 2:
            assert time.monotonic() < deadline, "an episode was not committed by itself"
            time.sleep(0.05)


def test_rollback_removes_later_steps_and_writes_an_event(directory: RunDirectory) -> None:
    with Recorder(directory) as recorder:
        for step in range(6):
            recorder.metrics(step, {"x": step})
            recorder.episode(step, episode(step), "trained")
        recorder.event("before")
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 6, "torn')
    with Recorder(directory) as recorder:
        recorder.rollback(3)
        recorder.metrics(4, {"x": 40})
    assert [(line["step"], line["x"]) for line in read_jsonl(directory.metrics_file)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [row.step for row in records.list_episodes(directory.episodes_file)] == [0, 1, 2, 3]
    before, rollback = read_jsonl(directory.events_file)
    assert before["event"] == "before"
    assert (rollback["event"], rollback["to_step"]) == ("rollback", 3)
    assert (rollback["episodes_removed"], rollback["metrics_removed"]) == (2, 2)


def test_the_caller_does_not_wait_for_the_disk(directory: RunDirectory) -> None:
    with Recorder(directory) as recorder:
        trajectories = [episode(number) for number in range(2000)]
        took = []
        for number, trajectory in enumerate(trajectories):
            before = time.thread_time()
            recorder.episode(number, trajectory, "trained")
            took.append(time.thread_time() - before)
        assert sorted(took)[-3] < 0.02  # garbage collection of a process with many tests may fall into one or two calls
    assert len(records.list_episodes(directory.episodes_file)) == 2000


def test_records_survive_a_kill(directory: RunDirectory) -> None:
    script = (
        "import os, sys; from pathlib import Path; from agentkit.run_directory import RunDirectory;"
        "from agentkit.store import Recorder; from agentkit.types import Trajectory;"
        "recorder = Recorder(RunDirectory.open(Path(sys.argv[1])));"
        "[recorder.episode(1, Trajectory(i, 0, 'A', 0, 0), 'trained') for i in range(300)];"
        "recorder.metrics(1, {'x': 1}); recorder.flush();"
        "[recorder.episode(2, Trajectory(i, 0, 'A', 0, 0), 'trained') for i in range(300)];"
        "os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", script, str(directory.path)], timeout=60, check=False)
    assert result.returncode == -9
    with Recorder(directory) as recorder:
        recorder.rollback(1)
    assert len(records.list_episodes(directory.episodes_file)) == 300
    assert len(list(read_jsonl(directory.metrics_file))) == 1


def test_a_disk_that_refuses_is_reported_and_never_hangs(directory: RunDirectory) -> None:
    recorder = Recorder(directory)
    with sqlite3.connect(directory.episodes_file) as connection:
        connection.execute("drop table episodes")
    recorder.episode(1, episode(1), "trained")
    with pytest.raises(RunDirectoryError, match="records cannot be written: no such table"):
        recorder.flush()
    with pytest.raises(RunDirectoryError, match="records cannot be written"):
        recorder.metrics(1, {})
    with pytest.raises(RunDirectoryError, match="records cannot be written"):
        recorder.close()
    recorder.close()
    assert not any(thread.name == "agentkit-recorder" for thread in threading.enumerate())
    with pytest.raises(RunDirectoryError, match="closed"):
        recorder.event("late")


def test_a_file_that_is_not_a_database_is_refused(directory: RunDirectory) -> None:
    directory.episodes_file.write_bytes(b"not a database, despite its name" * 100)
    with pytest.raises(RunDirectoryError, match="cannot be written to"):
        Recorder(directory)


class Broken:
    name = "broken"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the network is down")

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None: ...

    def log_samples(self, step: int, samples: Sequence[tuple[int, Trajectory]]) -> None: ...

    def rollback(self, step: int) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_that_fails_is_given_up_and_the_run_goes_on(directory: RunDirectory) -> None:
    with Recorder(directory, [Broken()]) as recorder:
        recorder.metrics(0, {"x": 0})
        recorder.metrics(1, {"x": 1})
    assert len(list(read_jsonl(directory.metrics_file))) == 2
    (event,) = read_jsonl(directory.events_file)
    assert (event["event"], event["tracker"]) == ("tracker_failed", "broken")
    assert "the network is down" in event["error"]


def test_a_torn_line_never_joins_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert list(read_jsonl(path)) == [{"a": 1}]
    writer = JsonlWriter(path)
    writer.write({"a": 3, "b": [float("inf"), 1.5], "text": "é\n"})
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"a": 1},
        {"a": 3, "b": [None, 1.5], "text": "é\n"},
    ]
