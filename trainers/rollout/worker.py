"""What runs in the processes of environments: a nursery that forks them (``envs/forking.py``), one an environment.

Invariant: a child makes one environment, and every request to it gets one reply; whatever the environment raises is a
reply too.
"""

from __future__ import annotations

import importlib
import json
import pickle
import runpy
import socket
from collections.abc import Callable
from typing import Any

# Preloaded once, shared by every child through copy-on-write.
import agentkit.envs.base
import agentkit.registry  # noqa: F401
from agentkit.envs import forking
from agentkit.errors import EnvError
from agentkit.trainers.rollout.contract import crashed, run_actions, run_reset

MAIN = "__agentkit_main__"
"""Name under which the user's script is loaded again, when it defines the environment itself."""


def nursery(control_fd: int) -> None:
    """Fork processes for environments until the control socket closes."""
    forking.nursery(control_fd, serve)


def serve(connection: socket.socket) -> None:
    """Make one environment and answer calls to it until the other end closes."""
    env: Any = None
    make: Callable[[], Any] = _unmade
    while True:
        request = forking.receive(connection)
        if request is None:
            return
        name, *arguments = pickle.loads(request)
        try:
            if name == "make":
                make = _maker(*arguments)
                continue  # told together with the reset that follows
            if name == "reset":
                if env is None:
                    env = _made(make)
                value: Any = run_reset(env, arguments[0])
            elif name == "act":
                value = run_actions(env, arguments[0])
            else:
                if env is not None:
                    env.close()
                value = None
            reply = ["ok", value]
        except EnvError as error:
            reply = [type(error).__name__, str(error)]
        except BaseException as error:
            reply = ["EnvCrashed", str(crashed(name, error))]
        forking.send(connection, json.dumps(reply).encode())
        if name == "close":
            return


def _unmade() -> Any:
    raise RuntimeError("no environment was named before the first reset")


def _made(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise crashed("making the environment", error) from error


def _maker(module: str, qualname: str, kwargs: dict[str, Any], main_path: str | None) -> Callable[[], Any]:
    def make() -> Any:
        if main_path is not None:
            target: Any = runpy.run_path(main_path, run_name=MAIN)[qualname.split(".")[0]]
            parts = qualname.split(".")[1:]
        else:
            target, parts = importlib.import_module(module), qualname.split(".")
        for part in parts:
            target = getattr(target, part)
        return target(**kwargs)

    return make
