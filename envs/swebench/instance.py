"""SWE-bench instances, read from the official files or from a task repository.

Invariant: an instance that loads can be graded: it has every column that the official evaluation reads. The row is kept
unchanged, because the official functions take rows.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentkit.errors import ConfigError

EXTRA = "pip install 'agentkit-rl[swe]'"
ROOT = "0:0"
"""Owner of the repository in official images."""
Split = Literal["train", "test"]
_NEEDED = (
    "instance_id", "repo", "version", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS",
    "PASS_TO_PASS", "image", "eval_script", "log_parser", "eval_type",
)  # fmt: skip


@dataclass(frozen=True)
class Instance:
    """One task: a repository at a commit, an issue, and the tests that decide whether it is resolved."""

    row: Mapping[str, Any]
    """All columns, unchanged."""

    def __post_init__(self) -> None:
        name = self.row.get("instance_id", "an instance")
        missing = [column for column in _NEEDED if self.row.get(column) is None]
        if missing:
            raise ConfigError(
                f"{name} lacks {', '.join(missing)}: data sets from before SWE-bench 5 do not specify their grading; "
                "use the current ones"
            )
        if self.row.get("image_assets") not in (None, "", "{}", {}):
            raise ConfigError(f"{name} needs images from the network (image_assets), which are not supported")

    @property
    def id(self) -> str:
        return self.row["instance_id"]

    @property
    def image(self) -> str:
        """The image with the repository at ``/testbed``."""
        return self.row["image"]

    @property
    def user(self) -> str:
        """Owner of ``/testbed`` in the image, as ``uid:gid``."""
        return self.row.get("user") or ROOT

    @property
    def patch(self) -> str:
        """The reference solution."""
        return self.row["patch"]

    @property
    def problem(self) -> str:
        return self.row["problem_statement"]

    @property
    def split(self) -> Split:
        """The part of the instance, decided by a digest of its name; a fifth are test instances."""
        return "test" if hashlib.sha256(self.id.encode()).digest()[0] % 5 == 0 else "train"


def load(path: Path) -> list[Instance]:
    """Return the instances of a ``.parquet``, ``.jsonl`` or ``.json`` file, or of a task repository, sorted by name.

    Raises:
        ConfigError: the path is none of these, an instance cannot be graded, or an extra is missing.
    """
    inside = path / "tasks"
    try:
        return list(_loaded(path, (inside if inside.is_dir() else path).stat().st_mtime_ns))
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ConfigError(f"{path} holds no SWE-bench instances: {problem}") from problem


@functools.lru_cache(maxsize=4)
def _loaded(path: Path, modified: int) -> tuple[Instance, ...]:
    # Cached, so that all environments of a process read a file only once.
    rows = list(_rows(path))
    instances = sorted((Instance(row) for row in rows), key=lambda instance: instance.id)
    if not instances:
        raise ConfigError(f"{path} holds no SWE-bench instance")
    twice = {one.id for one, other in itertools.pairwise(instances) if one.id == other.id}
    if twice:
        raise ConfigError(f"{path} holds {', '.join(sorted(twice))} twice")
    return tuple(instances)


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(f"reading {path.name} needs pyarrow: {EXTRA}") from error
        return pyarrow.parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        return list(rows.values()) if isinstance(rows, dict) else rows
    if (path / "tasks").is_dir():
        try:
            from swebench.task.repo import load_task_repo
        except ImportError as error:
            raise ConfigError(f"reading the task repository {path} needs the swebench package: {EXTRA}") from error
        return load_task_repo(path)
    raise ValueError("give a .parquet, .jsonl or .json file, or a folder with tasks/")


def count(folder: Path) -> dict[str, int]:
    """Return the number of instances of a data set, for ``agentkit data``."""
    return {"instances": sum(len(load(path)) for path in folder.glob("*.parquet"))}
