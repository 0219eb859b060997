"""A run directory belongs to one run and has one writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentkit.config import RunConfig
from agentkit.config_io import parse_config
from agentkit.errors import RunDirectoryError
from agentkit.run_directory import RunDirectory, changes


def config_for(path: Path, *overrides: str) -> RunConfig:
    return parse_config("env: {id: FrozenLake-v1}", [f"dir={path}", *overrides])


def test_create_open_and_read_back(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a" / "run", "learner.lr=3e-5")
    directory = RunDirectory.create(config)
    directory.release()
    assert {item.name for item in directory.path.iterdir()} >= {"config.yaml", "checkpoints", "logs"}
    assert RunDirectory.open(config.dir).config() == config


def test_reuse_is_refused_and_the_error_names_resume(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    directory = RunDirectory.create(config)
    (directory.checkpoints / "step-000000").mkdir()
    directory.release()
    with pytest.raises(RunDirectoryError, match=r"already contains a run; .*--resume .*--again"):
        RunDirectory.create(config)
    RunDirectory.resume(config.dir, config).release()  # the refusal let go of the lock


def test_a_run_that_recorded_nothing_may_be_started_again(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    RunDirectory.create(config).release()
    directory = RunDirectory.create(config)
    directory.release()
    assert directory.set_aside is None


def test_a_run_without_a_checkpoint_gives_way_and_its_records_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for attempt in (1, 2):
        directory = RunDirectory.create(config_for(path, f"seed={attempt}"))
        assert list(path.glob("*.jsonl")) == list(path.glob("episodes*")) == list(directory.checkpoints.iterdir()) == []
        directory.events_file.write_text(f"attempt {attempt}\n")
        directory.episodes_file.with_name("episodes.sqlite-wal").write_text("unfinished")
        (directory.logs / "engine.log").write_text("out of memory")
        (directory.checkpoints / "partial-000000").mkdir()
        directory.release()
    directory = RunDirectory.create(config_for(path, "seed=3"))
    directory.release()
    assert directory.set_aside == path / "failed-2"
    assert directory.config().seed == 3
    for attempt in (1, 2):
        kept = path / f"failed-{attempt}"
        assert (kept / "events.jsonl").read_text() == f"attempt {attempt}\n"
        assert (kept / "episodes.sqlite-wal").exists()
        assert (kept / "logs" / "engine.log").read_text() == "out of memory"
        assert RunDirectory.open(kept).config().seed == attempt


def test_a_process_killed_between_lock_and_configuration_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").touch()
    (path / ".config.yaml.4711.tmp").write_text("env")
    RunDirectory.create(config_for(path)).release()


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="not empty and not a run directory"):
        RunDirectory.create(config_for(tmp_path))
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        RunDirectory.create(config_for(tmp_path / "file" / "run"))


def test_open_refuses_other_directories(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory.open(tmp_path)


def test_resume_takes_new_lengths_but_not_another_experiment(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDirectory.create(config_for(path)).release()
    longer = config_for(path, "steps=99")
    RunDirectory.resume(path, longer).release()
    assert RunDirectory.open(path).config().steps == 99
    with pytest.raises(RunDirectoryError, match=r"env\.kwargs\.size: None → 8"):
        RunDirectory.resume(path, config_for(path, "env.kwargs.size=8"))
    with pytest.raises(RunDirectoryError, match="different directories"):
        RunDirectory.resume(path, config_for(tmp_path / "other"))


def test_a_moved_run_knows_where_it_is(tmp_path: Path) -> None:
    RunDirectory.create(config_for(tmp_path / "old")).release()
    (tmp_path / "old").rename(tmp_path / "new")
    assert RunDirectory.open(tmp_path / "new").config().dir == tmp_path / "new"


def test_a_second_process_is_kept_out_until_the_first_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = (
        "import sys, time; from agentkit.config_io import parse_config;"
        "from agentkit.run_directory import RunDirectory;"
        "held = RunDirectory.create(parse_config('env: {id: A}', ['dir=' + sys.argv[1]])); print('ready', flush=True);"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        config = RunDirectory.open(path).config()
        (path / "events.jsonl").write_text("{}\n")  # of a live run, that has no checkpoint yet
        with pytest.raises(RunDirectoryError, match="in use by another run"):
            RunDirectory.resume(path, config)
        with pytest.raises(RunDirectoryError, match="in use by another run"):
            RunDirectory.create(config)
        assert (path / "events.jsonl").exists()
    finally:
        process.kill()
        process.wait(10)
    RunDirectory.resume(path, config).release()


def test_changes_names_keys(tmp_path: Path) -> None:
    old, new = (
        config_for(tmp_path / "a"),
        config_for(tmp_path / "b", "learner.lr=2", "critic={}", "algorithm.advantage=gae"),
    )
    assert {key for key, _, _ in changes(old, new)} == {"learner.lr", "critic", "algorithm.advantage"}
