"""Worker process of the rollout loop: makes one environment and answers calls to it."""

from __future__ import annotations

import importlib
import runpy
from typing import Any

# Imported once by the fork server and shared by its workers through copy-on-write.
import agentkit.envs.base
import agentkit.registry  # noqa: F401
from agentkit.envs.workers.fork_server import Handler
from agentkit.errors import EnvError
from agentkit.trainers.rollout.contract import crashed, run_actions, run_reset

MAIN = "__agentkit_main__"
"""Module name under which the user's script is loaded again if it defines the environment itself."""


def make_handler() -> Handler:
    """Return what answers calls: with ``"ok"`` and a value, or with the name of an ``EnvError`` and a message."""
    env: Any = None

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        nonlocal env
        try:
            if name == "close":
                return "ok", None if env is None else env.close()
            if name == "act":
                return "ok", run_actions(env, arguments[0])
            seed, location = arguments
            if env is None:
                env = _make(*location)
            return "ok", run_reset(env, seed)
        except EnvError as error:
            return type(error).__name__, str(error)
        except BaseException as error:
            return "EnvCrashed", str(crashed(name, error))

    return handle


def _make(module: str, qualname: str, kwargs: dict[str, Any], main_path: str | None) -> Any:
    """Make the environment whose location ``EnvSource.importable`` returned. Raises ``EnvCrashed``."""
    first, *rest = qualname.split(".")
    try:
        found: Any
        if main_path is not None:
            found = runpy.run_path(main_path, run_name=MAIN)[first]
        else:
            found = getattr(importlib.import_module(module), first)
        for part in rest:
            found = getattr(found, part)
        return found(**kwargs)
    except (Exception, SystemExit) as error:
        raise crashed("making the environment", error) from error
