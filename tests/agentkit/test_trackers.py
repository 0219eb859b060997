"""Trackers write data that their own tools can read."""

from __future__ import annotations

import html
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_runs import HOSTILE, episode, turn
from requiring import require

from agentkit.config_io import parse_config
from agentkit.records import EVALUATION, read_episode
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder
from agentkit.text import printable
from agentkit.trackers import open_trackers


def evaluate(recorder: Recorder, step: int, text: str = "Right") -> None:
    """Record an evaluation of six episodes, the first one of an environment that failed."""
    recorder.begin_evaluation(step)
    recorder.episode(step, replace(episode(9, 0, 0.0, turns=[]), outcome="voided"), EVALUATION)
    for number in range(6):
        recorder.episode(step, episode(number, 0, 1.0, turns=[turn("Down"), turn(text, 1.0)]), EVALUATION)
    recorder.metrics(step, {"eval/success": 1.0})


def test_tensorboard_shows_logged_metrics_without_rolled_back_ones(tmp_path: Path) -> None:
    require("tensorboard", "pip install 'agentkit-rl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = parse_config("env: {id: A}", [f"dir={tmp_path / 'run'}", "trackers=[tensorboard]"])
    directory = RunDirectory.create(config)
    with Recorder(directory, open_trackers(config, directory)) as recorder:
        for update in (1, 2):
            recorder.metrics(0, {"imitation/updates": update, "imitation/loss": 1 / update})
        for step in range(1, 5):
            recorder.metrics(step, {"rollout/success": step / 10})
    with Recorder(directory, open_trackers(config, directory)) as recorder:
        recorder.rollback(2)
        recorder.metrics(3, {"rollout/success": 0.9})
        evaluate(recorder, 3, text=HOSTILE)
    events = EventAccumulator(str(directory.logs / "tensorboard"))
    events.Reload()
    success = [(event.step, round(event.value, 3)) for event in events.Scalars("rollout/success")]
    assert success == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert [event.step for event in events.Scalars("imitation/loss")] == [1, 2]
    (shown,) = events.Tensors("eval/episodes/text_summary")
    assert shown.step == 3
    first, *others = shown.tensor_proto.string_val[0].decode().split("\n\n---\n\n")
    assert len(others) == 3
    assert first.startswith("    FrozenLake-v1, seed 500: return 1, solved, terminated\n    --- turn 1: observation\n")
    assert "<script>window.attacked = 1</script>" in first
    assert all(line.startswith("    ") for text in (first, *others) for line in text.split("\n"))
    assert not set(first) & set("\x1b\x07\u202e\u2028")


def test_wandb_offline_keeps_the_run_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("wandb", "pip install 'agentkit-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = parse_config("env: {id: A}", [f"dir={tmp_path / 'run'}", "trackers=[wandb]", "name=mine"])
    directory = RunDirectory.create(config)
    with Recorder(directory, open_trackers(config, directory)) as recorder:
        for step in range(1, 4):
            recorder.metrics(step, {"rollout/success": step / 10})
        evaluate(recorder, 3)
    (table,) = (directory.logs / "wandb").glob("offline-run-*/files/media/table/eval/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["seed", "return", "success", "turns", "episode"]
    assert [row[:4] for row in content["data"]] == [[500 + number, 1.0, True, 2] for number in range(4)]
    assert "answer, reward 1\nRight" in content["data"][0][4]
    (file,) = (directory.logs / "wandb").glob("offline-run-*/*.wandb")
    history, name, project = read_wandb(file)
    success = [(row["step"], row["rollout/success"]) for row in history if "rollout/success" in row]
    assert success == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert (name, project) == ("mine", "agentkit")
    again = open_trackers(config, directory)  # a resumed run keeps its identity
    again[0].close()
    # offline-run-DATE_TIME-ID, and a further number where two sessions began within one second
    names = {path.name.split("-")[3] for path in (directory.logs / "wandb").glob("offline-run-*")}
    assert names == {(directory.logs / "wandb.id").read_text()}


def train(recorder: Recorder, step: int, text: str) -> None:
    """Record a step with two groups of two episodes, and an episode that was not trained on."""
    recorder.episode(step, episode(10 * step, 0, 0.0), "dropped", "zero_signal")
    for group in (10 * step + 1, 10 * step + 2):
        for member in range(2):
            played = episode(group, member, 1.0, turns=[turn("Down", observation=text), turn("Right", 1.0)])
            recorder.episode(step, played, "trained")
    recorder.metrics(step, {"rollout/success": 1.0})


def test_tensorboard_shows_samples_as_a_table(tmp_path: Path) -> None:
    require("tensorboard", "pip install 'agentkit-rl[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    config = parse_config("env: {id: A}", [f"dir={tmp_path / 'run'}", "trackers=[tensorboard]"])
    directory = RunDirectory.create(config)
    text = f"a|b **bold** [link](http://x) `code` # 1\n| - |\n{HOSTILE}"
    with Recorder(directory, open_trackers(config, directory), sample_every=2) as recorder:
        for step in range(1, 5):
            train(recorder, step, text)
        evaluate(recorder, 4)
    events = EventAccumulator(str(directory.logs / "tensorboard"))
    events.Reload()
    tables = events.Tensors("rollout/samples/text_summary")
    assert [table.step for table in tables] == [2, 4]
    page = markdown_to_safe_html(tables[1].tensor_proto.string_val[0].decode())  # as TensorBoard shows it
    assert page.count("<tr>") == 3
    assert re.findall(r"<th>(.*?)</th>", page) == ["step", "episode", "reward", "outcome", "prompt", "answer"]
    row = re.findall(r"<td>(.*?)</td>", page)[:6]
    assert row[:4] == ["4", "17", "1", "solved, terminated"]  # five episodes in each step before, and a dropped one
    assert not re.findall(r"<(?!br)", row[4])
    shown = html.unescape(re.sub("<br ?/?>", "\n", row[4])).replace("\xa0", " ")
    assert shown == f"Reach the goal.\n\n{printable(text)}"
    assert row[5].startswith("Down<br")
    assert row[5].endswith("Right")


def test_wandb_shows_samples_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("wandb", "pip install 'agentkit-rl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = parse_config("env: {id: A}", [f"dir={tmp_path / 'run'}", "trackers=[wandb]", "sample_every=3"])
    directory = RunDirectory.create(config)
    with Recorder(directory, open_trackers(config, directory), sample_every=config.sample_every) as recorder:
        for step in range(1, 4):
            train(recorder, step, "P _ G")
    (table,) = (directory.logs / "wandb").glob("offline-run-*/files/media/table/rollout/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "episode", "reward", "outcome", "prompt", "answer"]
    assert [row[:4] for row in content["data"]] == [[3, id, 1.0, "solved, terminated"] for id in (12, 14)]
    for row in content["data"]:
        trained = read_episode(directory.episodes_file, row[1])[0]
        assert (trained.step, trained.ending, trained.member) == (3, "trained", 0)
        assert row[4] == "Reach the goal.\n\nP _ G"
        assert row[5] == "Down\n--- turn 2: observation\nP _ G\n--- turn 2: answer\nRight"


def read_wandb(file: Path) -> tuple[list[dict], str, str]:
    """Return the history, name and project in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    history, name, project = [], "", ""
    for data in leveldb_log(file.read_bytes()[7:], start=7):
        record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif record.WhichOneof("record_type") == "run":
            name, project = record.run.display_name, record.run.project
    return history, name, project


def leveldb_log(data: bytes, start: int) -> Iterator[bytes]:
    """Records of a log in LevelDB's format (crc, length, type in blocks of 32 KiB), which follow W&B's own header."""
    offset, parts = 0, b""
    while offset + 7 <= len(data):
        left = 32768 - (start + offset) % 32768
        if left < 7:
            offset += left
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
