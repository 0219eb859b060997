"""Make every registered name available as ``gymnasium.make("agentkit:agentkit/<name>")``.

Invariant: the names are registered as soon as both packages are imported, in either order, and no environment is
loaded. gymnasium imports the module before the colon. ``import agentkit`` must be fast, so it does not import
gymnasium; it registers the names when gymnasium is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAMESPACE = "agentkit"


class _AfterGymnasium(importlib.abc.MetaPathFinder):
    """Call ``sync`` after the import of gymnasium."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_sync(module: ModuleType) -> None:
                execute(module)
                sync()

            loader.exec_module = execute_and_sync
        return spec


def install() -> None:
    """Register our names in gymnasium, now or as soon as it is imported."""
    if "gymnasium" in sys.modules:
        sync()
    elif not any(isinstance(finder, _AfterGymnasium) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterGymnasium())


def sync() -> None:
    """Register names that gymnasium does not have yet; do nothing if gymnasium is not imported."""
    if "gymnasium.envs.registration" not in sys.modules:
        return
    from gymnasium.envs.registration import registry as theirs

    from agentkit import registry
    from agentkit.gymnasium_spec import LazySpec

    for known in registry.list_envs():
        theirs.setdefault(f"{NAMESPACE}/{known.id}", LazySpec(f"{NAMESPACE}/{known.id}"))
