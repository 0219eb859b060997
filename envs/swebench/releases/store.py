"""Where tasks made of releases lie on this machine.

Invariant: the folder is a task repository in the official format: it loads with ``instance.load`` and with the
``swebench`` package alike. A task is there complete or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path

from agentkit import data
from agentkit.errors import ConfigError

NAME = "swe-releases"
IMAGES = "agentkit/swe"
"""How the names of the images begin, which no registry has."""
BUILD = "agentkit data swe-from-releases --shipped"


def folder() -> Path:
    """The task repository; it need not exist."""
    return data.root() / NAME


def tasks() -> Path:
    """The task repository. Raises ``ConfigError`` if nothing was built yet."""
    if not any((folder() / "tasks").glob("*/task.yaml")):
        raise ConfigError(
            f"there are no SWE tasks in {folder()}: build those that agentkit ships by `{BUILD}` (downloads about "
            "10 MB, needs Docker), or give instances=FILE with a SWE-bench data set"
        )
    return folder()


def find(instances: str | os.PathLike[str] | None) -> Path:
    """Where instances lie: a path, the name of a data set, or None for the tasks that were built here.

    Raises ``ConfigError``, ``DataError``.
    """
    if instances is None:
        return tasks()
    if instances in data.DATASETS:
        return next(data.locate(str(instances)).glob("*.parquet"))
    return Path(instances)


def sources() -> Path:
    """Where source archives are kept."""
    return folder() / "sources"
