"""The games of a split: the official folder layout, the official filter, and a cached index.

Invariant: game files are never written. The games of a split are sorted by name. The folder of a split is searched
once; its index is stored apart from the games and is valid until a game file is added, removed or changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from agentkit.envs.alfworld.cache import write_cached
from agentkit.errors import ConfigError, DataError

Split = Literal["train", "valid_seen", "valid_unseen"]
Task = Literal[
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
]
SPLITS: tuple[Split, ...] = get_args(Split)
TASKS: tuple[Task, ...] = get_args(Task)
"""In the order of the official numbers 1 to 6."""
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
_VERSION = 2
_TAIL = 64
_SOLVABLE = re.compile(rb'"solvable": (true|false)\}\s*$')


@dataclass(frozen=True)
class GameFile:
    """One game; ``name`` is ``TASK-OBJECT-MOVABLE-RECEPTACLE-SCENE/trial_…``, relative to the folder of its split."""

    name: str
    path: Path

    @property
    def task(self) -> str:
        return self.name.partition("-")[0]

    @property
    def goal(self) -> dict[str, object]:
        """The goal in the terms of ALFRED's ``traj_data.json``, read from the folder's name."""
        task, thing, movable, receptacle, _ = self.name.partition("/")[0].split("-")
        looks = task == "look_at_obj_in_light"
        return {
            "task_type": task,
            "object_target": thing,
            "parent_target": "" if looks else receptacle,
            "toggle_target": receptacle if looks else "",
            "mrecep_target": "" if movable == "None" else movable,
            "object_sliced": False,
        }


def games(folder: Path, split: Split, index: Path | None = None) -> tuple[GameFile, ...]:
    """Return the playable games of a split, by the official filter.

    Args:
        folder: contains ``train``, ``valid_seen``, ``valid_unseen``, directly or in a ``json_…`` folder as in archives.
        index: folder of the cached index; None keeps it in memory only.

    Raises:
        DataError: the split is missing, cannot be read, or contains no playable game.
    """
    try:
        root = _root(folder, split)
        return _listed(root, _folders(root), index)
    except OSError as error:
        raise DataError(f"the games of split {split} in {folder} cannot be read: {error}") from error


def count(folder: Path) -> Mapping[str, int]:
    """Return the number of games of each split that exists."""
    return {split: len(games(folder, split)) for split in SPLITS if _roots(folder, split)}


def _roots(folder: Path, split: Split) -> list[Path]:
    candidates = [folder / split, *(inner / split for inner in sorted(folder.glob("json_*"), reverse=True))]
    return [candidate for candidate in candidates if candidate.is_dir()]


def _root(folder: Path, split: Split) -> Path:
    found = _roots(folder, split)
    if not found:
        raise DataError(f"{folder} holds no ALFWorld games of split {split}: neither {split}/ nor json_*/{split}/")
    return found[0].resolve()


def _folders(root: Path) -> tuple[tuple[str, int], ...]:
    """Return the folders of tasks, and when a trial was last added to or removed from each."""
    with os.scandir(root) as entries:
        return tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_dir()))


def _fingerprint(root: Path, folders: tuple[tuple[str, int], ...]) -> str:
    """Return a hash that changes whenever a game file is added, removed or rewritten."""
    files = []
    for folder, _ in folders:
        for trial in sorted(os.listdir(f"{root}/{folder}")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a trial may lack its game
                files.append((folder, trial, os.stat(f"{root}/{folder}/{trial}/{GAME}").st_mtime_ns))
    return hashlib.sha256(json.dumps([_VERSION, str(root), files]).encode()).hexdigest()


@functools.lru_cache(maxsize=16)
def _listed(root: Path, folders: tuple[tuple[str, int], ...], index: Path | None) -> tuple[GameFile, ...]:
    kept = None if index is None else index / f"alfworld-{_fingerprint(root, folders)[:32]}.json"
    try:
        names = json.loads(kept.read_text("utf-8")) if kept is not None else None
    except (OSError, ValueError):
        names = None
    if names is None:
        names = list(_playable(root))
        if kept is not None and names:
            write_cached(kept, json.dumps(names).encode())
    if not names:
        raise DataError(f"{root} holds no playable game: none of its {GAME} files has a known task and is solvable")
    return tuple(GameFile(name, root / name / GAME) for name in names)


def _playable(root: Path) -> Iterator[str]:
    for folder in sorted(root.iterdir()):
        # The official filter: no movable receptacles, no slicing, a known task, solvable.
        if "movable" in folder.name or "Sliced" in folder.name or folder.name.partition("-")[0] not in TASKS:
            continue
        for path in sorted(folder.glob(f"*/{GAME}")):
            if _solvable(path):
                yield f"{folder.name}/{path.parent.name}"


def _solvable(path: Path) -> bool:
    """Return whether a game file is marked as solvable. The mark is its last entry; the rest is not read."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL))
        if said := _SOLVABLE.search(stream.read()):
            return said[1] == b"true"
    try:
        return bool(json.loads(path.read_text("utf-8")).get("solvable"))
    except ValueError:
        return True  # reported when the game is played


def select(listed: tuple[GameFile, ...], tasks: str | Sequence[str] | None) -> tuple[GameFile, ...]:
    """Return the games of one or several tasks. Raises ``ConfigError`` for a task that is unknown or has no game."""
    if tasks is None:
        return listed
    tasks = [tasks] if isinstance(tasks, str) else tasks
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ConfigError(f"tasks={list(tasks)}: the tasks are {', '.join(TASKS)}")
    chosen = tuple(game for game in listed if game.task in tasks)
    if not chosen:
        raise ConfigError(f"tasks={list(tasks)}: none of the {len(listed)} games of this split has such a task")
    return chosen
