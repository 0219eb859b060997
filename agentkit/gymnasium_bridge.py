"""Makes every registered name reachable as ``gymnasium.make("agentkit:agentkit/<name>")``.

Invariant: gymnasium knows our names whenever both packages are imported, in whichever order, and neither importing nor
listing them loads an environment. gymnasium imports the module named before the colon; since `import agentkit` must
stay cheap, it does not import gymnasium but waits for it.
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
    """Watches for the import of gymnasium, steps aside, and calls ``sync`` once it is complete."""

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
    """Tell gymnasium our names, now or as soon as it is imported."""
    if "gymnasium" in sys.modules:
        sync()
    elif not any(isinstance(finder, _AfterGymnasium) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterGymnasium())


def sync() -> None:
    """Register those of our names that gymnasium lacks; does nothing while gymnasium is not imported."""
    if "gymnasium.envs.registration" not in sys.modules:
        return
    from gymnasium.envs.registration import registry as theirs

    from agentkit import registry
    from agentkit.gymnasium_spec import LazySpec

    for known in registry.list_envs():
        theirs.setdefault(f"{NAMESPACE}/{known.id}", LazySpec(f"{NAMESPACE}/{known.id}"))
