"""Worker process of ``make_vec(mode="process")``: makes one environment and answers calls to it."""

from __future__ import annotations

from typing import Any

from agentkit.envs.isolation.server import ServedEnv, register_missing
from agentkit.envs.workers.fork_server import Handler
from agentkit.errors import AgentkitError, EnvError


def make_handler() -> Handler:
    """Return what answers calls: with ``"ok"`` and a value, or with the name of an error class and a message.

    Making the environment may raise any ``AgentkitError``; an episode only an ``EnvError``.
    """
    env: ServedEnv | None = None

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        nonlocal env
        try:
            if name == "make":
                id, entry_point, kwargs = arguments
                register_missing(id, entry_point)
                env = ServedEnv(id, kwargs)
                return "ok", env.describe()
            return "ok", getattr(env, "drop" if name == "close" else name)(*arguments)
        except BaseException as error:
            if isinstance(error, AgentkitError if name == "make" else EnvError):
                return type(error).__name__, str(error)
            return "EnvCrashed", f"{name} raised {type(error).__name__}: {error}"

    return handle
