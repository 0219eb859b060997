"""A checkpoint is complete or absent, at any file operation at which the process dies."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentkit.errors import CheckpointError
from agentkit.trainers import checkpoint

KEEP = 2


class Killed(BaseException):
    """Not an ``Exception``, so that no handler catches a kill."""


def save(directory: Path, step: int) -> None:
    partial = checkpoint.begin(directory, step)
    for part in ("learner", "model"):
        (partial / part).mkdir()
        (partial / part / "weights").write_text(f"{part} {step}")
    checkpoint.commit(partial, step, rollout={"step": step}, state={"step": step}, keep=KEEP)


def check(directory: Path, steps: list[int]) -> None:
    """Assert that all checkpoints are complete and the newest is one of ``steps``."""
    found = checkpoint.list_checkpoints(directory)
    assert found[-1].step in steps
    for one in found:
        assert one.state["step"] == one.step == one.rollout_state()["step"]
        assert (one.model / "weights").read_text() == f"model {one.step}"
        assert (one.learner / "weights").read_text() == f"learner {one.step}"


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Die before the ``number``-th operation of this thread that changes the file system; returns how many were asked
    for. Threads that other tests left in this process go on."""
    count, thread = 0, threading.get_ident()

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if threading.get_ident() == thread:
                count += 1
                if count >= number:
                    raise Killed
            return operation(*args, **kwargs)

        return wrapper

    for name in ("unlink", "rmdir", "rename", "replace", "mkdir", "symlink", "fsync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint_and_tidying_finishes_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before").mkdir()
    for step in (1, 2):
        save(tmp_path / "before" / "checkpoints", step)
    number, done = 0, False
    while not done:
        number += 1
        run = tmp_path / f"kill-{number}"
        shutil.copytree(tmp_path / "before", run, symlinks=True)
        with monkeypatch.context() as patch:
            asked = kill_at(number, patch)
            try:
                save(run / "checkpoints", 3)
                done = True
            except Killed:
                pass
        check(run / "checkpoints", [3] if done else [2, 3])
        checkpoint.tidy(run / "checkpoints", KEEP)
        check(run / "checkpoints", [3] if done else [2, 3])
        newest = checkpoint.list_checkpoints(run / "checkpoints")[-1]
        assert len(os.listdir(run / "checkpoints")) == KEEP
        assert (run / "model").resolve() == newest.model.resolve()
        assert done or asked() == number
    assert number > 15, "the kills did not cover the work"


def test_a_kill_while_a_model_is_added_leaves_the_adapter_or_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tmp_path / "before" / "checkpoints"
    for step in (1, 2):
        partial = checkpoint.begin(before, step)
        (partial / "learner" / "adapter").mkdir(parents=True)
        (partial / "learner" / "adapter" / "weights").write_text(f"adapter {step}")
        checkpoint.commit(partial, step, rollout={}, state={}, keep=KEEP)
    assert (tmp_path / "before" / "model" / "weights").read_text() == "adapter 2"
    number, done, seen = 0, False, set()
    while not done:
        number += 1
        run = tmp_path / f"kill-{number}"
        shutil.copytree(tmp_path / "before", run, symlinks=True)
        with monkeypatch.context() as patch:
            asked = kill_at(number, patch)
            try:
                partial = checkpoint.begin(run / "checkpoints", 2)
                (partial / "model").mkdir()
                for name in ("weights", "config"):
                    (partial / "model" / name).write_text(f"{name} 2")
                checkpoint.add_model(partial, checkpoint.list_checkpoints(run / "checkpoints")[-1], keep=KEEP)
                done = True
            except Killed:
                pass
        checkpoint.tidy(run / "checkpoints", KEEP)
        newest = checkpoint.list_checkpoints(run / "checkpoints")[-1]
        whole = newest.whole_model.is_dir()
        seen.add(whole)
        files = {path.name: path.read_text() for path in newest.model.iterdir()}
        assert files == ({"weights": "weights 2", "config": "config 2"} if whole else {"weights": "adapter 2"})
        assert (run / "model").resolve() == newest.model.resolve()
        assert len(os.listdir(run / "checkpoints")) == KEEP
        assert (done, whole) != (True, False)
        assert done or asked() == number
    assert seen == {False, True}


def test_a_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "step-000001" / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.list_checkpoints(tmp_path / "checkpoints")
