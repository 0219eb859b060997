"""Checkpoints: directories that are complete or absent.

Invariant: a checkpoint holds the state of a run at one instant between two training steps: weights, optimiser,
scheduler, random states, the gate, finished but unused groups, and the cursor of the tasks. It is written under a
temporary name, synced and renamed, so a kill at any moment leaves the previous checkpoint intact.

Layout of ``checkpoints/step-000010/``: ``learner/`` (the learner's own files), ``model/`` (a Hugging Face directory),
``rollout.bin`` (state of the rollout loop) and ``state.json`` (state of the controller, format version). With adapters,
``learner/adapter/`` is in the format of PEFT, and only the last checkpoint of a finished run gets a ``model/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkit.errors import CheckpointError
from agentkit.model_files import ADAPTER

FORMAT = 2
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk, made after ``step`` training steps."""

    path: Path
    step: int
    state: Mapping[str, Any]
    """Counters of the controller."""

    @property
    def learner(self) -> Path:
        return self.path / "learner"

    @property
    def whole_model(self) -> Path:
        """The exported model; with adapters, only a finished run has one."""
        return self.path / "model"

    @property
    def model(self) -> Path:
        """The policy in a format that can be loaded: the exported model, otherwise the adapter."""
        return self.whole_model if self.whole_model.is_dir() else self.learner / ADAPTER

    def rollout_state(self) -> dict[str, Any]:
        """Return the state of the rollout loop. It is a pickle: load only checkpoints that you trust."""
        return pickle.loads((self.path / "rollout.bin").read_bytes())


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Return all complete checkpoints in ``directory``, oldest first."""
    found = []
    for path in directory.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(_read(path, int(match.group(1))))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _read(path: Path, step: int) -> Checkpoint:
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: state.json cannot be read ({error}); remove the directory to resume from an older one"
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this version of agentkit reads {FORMAT}; "
            "resume with the version that wrote it"
        )
    return Checkpoint(path, step, state)


def begin(directory: Path, step: int) -> Path:
    """Create a temporary directory; the learner writes ``learner/`` and ``model/`` into it."""
    partial = directory / f"partial-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, step: int, *, rollout: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> Checkpoint:
    """Complete ``partial``, rename it to ``step-NNNNNN``, then ``tidy``."""
    (partial / "rollout.bin").write_bytes(pickle.dumps(dict(rollout), protocol=5))
    (partial / "state.json").write_text(json.dumps({**state, "format": FORMAT}, indent=2))
    _sync_all(partial)
    final = partial.parent / f"step-{step:06d}"
    if not final.exists():  # it exists, for example, if a resumed run stops at once
        partial.rename(final)
        _sync(final.parent)
    tidy(final.parent, keep)
    return _read(final, step)


def add_model(partial: Path, to: Checkpoint, *, keep: int) -> None:
    """Move the whole model at ``partial / "model"`` to a checkpoint that has none, then ``tidy``."""
    _sync_all(partial)
    (partial / "model").rename(to.whole_model)
    _sync(to.path)
    tidy(partial.parent, keep)


def tidy(directory: Path, keep: int) -> None:
    """Remove partial checkpoints and all but the newest ``keep``; complete what a kill interrupted.

    Also link ``../model`` to the newest model or adapter, so a run directory can be used as a model path.
    """
    for partial in directory.glob("partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
    found = list_checkpoints(directory)
    if found:
        _point(directory.parent / "model", found[-1].model.relative_to(directory.parent))
    for old in found[:-keep]:
        # A partially removed checkpoint must not look complete.
        shutil.rmtree(old.path.rename(directory / f"partial-{old.step:06d}"), ignore_errors=True)


def _point(link: Path, target: Path) -> None:
    fresh = link.with_name(link.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    fresh.symlink_to(target)
    fresh.replace(link)


def _sync_all(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
