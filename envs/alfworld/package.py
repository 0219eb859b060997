"""What the ``alfworld`` package ships: the domain, the grammar, the goals, and what fits where.

Invariant: importing it here leaves nothing behind: neither the folder that it makes for its own data, nor a variable in
the environment.
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
            f"AlfWorld-v0 needs {', '.join(missing)}, not installed here: {REMEDY} (for a sandbox's image: "
            "agentkit sandbox build --package alfworld)"
        )


def load(module: str) -> Any:
    """A module of the package. Raises ``RegistryError`` without the extra."""
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
    """Types of objects and receptacles, their properties, and what may contain what."""
    return load("alfworld.gen.constants")


@functools.cache
def goals() -> dict[str, Any]:
    """Task → its goal in PDDL and its sentences, with places for names."""
    return load("alfworld.gen.goal_library").gdict


@functools.cache
def texts() -> tuple[str, str]:
    """The domain and the grammar of version 2.1.2, whose task is ``UNKNOWN GOAL``."""
    info = load("alfworld.info")
    return Path(info.ALFRED_PDDL_PATH).read_text("utf-8"), Path(info.ALFRED_TWL2_PATH).read_text("utf-8")
