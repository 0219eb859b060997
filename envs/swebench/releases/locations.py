"""Folders of tasks that were built from releases.

Invariant: the folder is a task repository in the official format, which ``instance.load`` and the ``swebench`` package
can read. A task in it is always complete.
"""

from __future__ import annotations

import os
from pathlib import Path

from agentkit import data
from agentkit.errors import ConfigError

NAME = "swe-releases"
IMAGES = "agentkit/swe"
"""Prefix of the names of images, which is in no registry."""
BUILD = "agentkit data swe-from-releases --shipped"


def folder() -> Path:
    """Return the task repository, which may not exist."""
    return data.root() / NAME


def tasks() -> Path:
    """Return the task repository. Raises ``ConfigError`` if nothing was built yet."""
    if not any((folder() / "tasks").glob("*/task.yaml")):
        raise ConfigError(
            f"no SWE tasks in {folder()}; build the shipped ones with `{BUILD}` (downloads about 10 MB, needs "
            "Docker), or pass instances=FILE with a SWE-bench data set"
        )
    return folder()


def find(instances: str | os.PathLike[str] | None) -> Path:
    """Return the path of instances: a path, the name of a data set, or None for the tasks that were built here.

    Raises ``ConfigError``, ``DataError``.
    """
    if instances is None:
        return tasks()
    if instances in data.DATASETS:
        return next(data.locate(str(instances)).glob("*.parquet"))
    return Path(instances)


def sources() -> Path:
    """Return the folder of source archives."""
    return folder() / "sources"
