"""Data of the ``alfworld`` package: the domain, the grammar, the goals, and which receptacle may contain which object.

Invariant: importing the package through this module leaves neither its data folder nor an environment variable behind.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from agentkit.errors import RegistryError

REMEDY = 'pip install "agentkit-rl[alfworld]"'
_NEEDED = ("alfworld", "textworld", "fast_downward")


def require() -> None:
    """Raise ``RegistryError`` unless the extra ``alfworld`` is installed; imports nothing of it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RegistryError(
            f"AlfWorld-v0 needs {', '.join(missing)}, which are not installed: {REMEDY} (for a sandbox's image: "
            "agentkit sandbox build --package alfworld)"
        )


def load(module: str) -> Any:
    """Import a module of the package. Raises ``RegistryError`` without the extra."""
    require()
    before = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = before or tempfile.gettempdir()
    try:
        return importlib.import_module(module)
    finally:
        if before is None:
            del os.environ["ALFWORLD_DATA"]


@functools.cache
def constants() -> Any:
    """Return the types of objects and receptacles, their properties, and what may contain what."""
    return load("alfworld.gen.constants")


@functools.cache
def goals() -> dict[str, Any]:
    """Return for each task its goal in PDDL and its sentences, with placeholders for names."""
    return load("alfworld.gen.goal_library").gdict


@functools.cache
def texts() -> tuple[str, str]:
    """Return the domain and the grammar of version 2.1.2, in which the task is ``UNKNOWN GOAL``."""
    info = load("alfworld.info")
    return Path(info.ALFRED_PDDL_PATH).read_text("utf-8"), Path(info.ALFRED_TWL2_PATH).read_text("utf-8")
