"""Files of tasks in JSON lines, and their division into training and test parts.

Invariant: only the digest of a task's text decides its part, so the parts never share a task. A file is read once for
all environments of a process.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from agentkit.config import Strict
from agentkit.errors import ConfigError

Split = Literal["train", "test"]
TEST_SHARE = 0.2
"""Fraction of all tasks in ``split="test"``, which are never trained on."""

T = TypeVar("T", bound=Strict)


def part_of(text: str) -> Split:
    """Return the part of the task with this text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


def check_split(split: str | None) -> None:
    """Raise ``ValueError`` if ``split`` is not a part."""
    if split not in (None, "train", "test"):
        raise ValueError(f"split={split!r} must be 'train', 'test' or None")


def load(path: str | Path, model: type[T], text: str, split: Split | None) -> tuple[T, ...]:
    """Return the tasks of a file.

    Args:
        path: file with one JSON object per line.
        model: the type of each task.
        text: name of the field that contains the task, which decides its part.
        split: return only tasks of this part; None returns all.

    Raises:
        ConfigError: the file does not exist, a line is invalid, or no task belongs to ``split``.
    """
    try:
        every = _read(str(path), Path(path).stat().st_mtime_ns, model)
    except OSError as error:
        raise ConfigError(f"the tasks {str(path)!r} cannot be read: {error.strerror or error}") from error
    tasks = tuple(task for task in every if split is None or part_of(getattr(task, text)) == split)
    if not tasks:
        raise ConfigError(f"{path} contains {len(every)} tasks, but none in split={split!r}; add more tasks")
    return tasks


@functools.lru_cache(maxsize=16)
def _read(path: str, modified: int, model: type[T]) -> tuple[T, ...]:
    tasks = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            tasks.append(model.model_validate_json(line))
        except ValidationError as error:
            told = (".".join(map(str, item["loc"])) + ": " * bool(item["loc"]) + item["msg"] for item in error.errors())
            problems = "; ".join(told)
            raise ConfigError(f"{path}, line {number}: {problems}") from None
    return tuple(tasks)
