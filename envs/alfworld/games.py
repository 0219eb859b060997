"""Which games there are: the official layout of folders, the official filter, and an index of them.

Invariant: game files are only ever read. A split is listed in one order, that of the names, wherever it lies; walking
it happens once, since the index is kept apart from the games and holds as long as no game file comes, goes or changes.
A process asks that of every file once, and afterwards of the tasks' folders alone.
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

from agentkit.envs.alfworld.keeping import keep
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
"""In the order of the official numbers, 1 to 6."""
GAME, TRAJECTORY = "game.tw-pddl", "traj_data.json"
_VERSION = 2
_TAIL = 64
_SOLVABLE = re.compile(rb'"solvable": (true|false)\}\s*$')


@dataclass(frozen=True)
class GameFile:
    """One game: ``name`` is ``TASK-OBJECT-MOVABLE-RECEPTACLE-SCENE/trial_…``, below its split's folder."""

    name: str
    path: Path

    @property
    def task(self) -> str:
        return self.name.partition("-")[0]

    @property
    def goal(self) -> dict[str, object]:
        """What is to be done, in the terms of ALFRED's ``traj_data.json``: the folder's name tells as much."""
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
    """The playable games of a split, by the official filter.

    Args:
        folder: holds ``train``, ``valid_seen``, ``valid_unseen``, itself or in a ``json_…`` folder, as archives do.
        index: a folder to keep the index in; None keeps it in memory only.

    Raises:
        DataError: the split is not there, cannot be read, or holds no playable game.
    """
    try:
        root = _root(folder, split)
        return _listed(root, _folders(root), index)
    except OSError as error:
        raise DataError(f"the games of split {split} in {folder} cannot be read: {error}") from error


def count(folder: Path) -> Mapping[str, int]:
    """Games of each split that is there."""
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
    """The tasks' folders, and when each had a trial added or removed."""
    with os.scandir(root) as entries:
        return tuple(sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.is_dir()))


def _fingerprint(root: Path, folders: tuple[tuple[str, int], ...]) -> str:
    """Changes whenever a game file comes, goes, or is written anew."""
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
            keep(kept, json.dumps(names).encode())
    if not names:
        raise DataError(f"{root} holds no playable game: none of its {GAME} files is solvable and of a known task")
    return tuple(GameFile(name, root / name / GAME) for name in names)


def _playable(root: Path) -> Iterator[str]:
    for folder in sorted(root.iterdir()):
        # The official filter: neither movable receptacles nor slicing, a known task, solvable.
        if "movable" in folder.name or "Sliced" in folder.name or folder.name.partition("-")[0] not in TASKS:
            continue
        for path in sorted(folder.glob(f"*/{GAME}")):
            if _solvable(path):
                yield f"{folder.name}/{path.parent.name}"


def _solvable(path: Path) -> bool:
    """What a game's file says; it is its last word, so that the rest need not be read."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL))
        if said := _SOLVABLE.search(stream.read()):
            return said[1] == b"true"
    try:
        return bool(json.loads(path.read_text("utf-8")).get("solvable"))
    except ValueError:
        return True  # found out, and reported, when it is to be played


def select(listed: tuple[GameFile, ...], tasks: str | Sequence[str] | None) -> tuple[GameFile, ...]:
    """The games of a task, or of some. Raises ``ConfigError`` for a task that is unknown or has no game."""
    if tasks is None:
        return listed
    tasks = [tasks] if isinstance(tasks, str) else tasks
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise ConfigError(f"tasks={list(tasks)}: the tasks are {', '.join(TASKS)}")
    chosen = tuple(game for game in listed if game.task in tasks)
    if not chosen:
        raise ConfigError(f"tasks={list(tasks)}: there is no such game among {len(listed)}")
    return chosen
