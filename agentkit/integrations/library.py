"""A library of environments in a worker process.

Invariant: code of the library runs only there. Its global random state, its crashes and its endless loops stay in that
process, and each of its failures is an ``EnvError`` here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentkit.envs.workers.client import shared_server
from agentkit.envs.workers.fork_server import Handler
from agentkit.envs.workers.worker import Worker
from agentkit.errors import ConfigError, EnvCrashed

CALL_TIMEOUT = 120.0
"""Seconds for one call of a library."""


class Library:
    """A process that uses a library; starts with the first call, and again with the first one after a failure.

    Args:
        module: imports the library; its ``make_handler()`` is ``serve(...)``.
    """

    def __init__(self, module: str) -> None:
        self._worker = Worker(shared_server(module))

    @property
    def alive(self) -> bool:
        """Whether the process runs, with the state that earlier calls left in it."""
        return self._worker.alive

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function in the process.

        Raises:
            ConfigError: the function refuses the arguments.
            EnvCrashed, EnvTimeout: it raised anything else, took too long, or its process died.
        """
        kind, value = self._worker.call(name, *arguments, timeout=CALL_TIMEOUT)
        if kind == "ok":
            return value
        if kind == "refused":
            raise ConfigError(value)
        self._worker.kill()
        raise EnvCrashed(value)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._worker.kill()


def ask(module: str, name: str, *arguments: Any) -> Any:
    """Call one function in a new process, which then ends. Raises as ``Library.call``."""
    library = Library(module)
    try:
        return library.call(name, *arguments)
    finally:
        library.close()


def serve(*functions: Callable[..., Any]) -> Handler:
    """Return what answers the calls of ``Library`` in its process: each function by its name."""
    named = {function.__name__: function for function in functions}

    def handle(name: str, *arguments: Any) -> tuple[str, Any]:
        try:
            return "ok", named[name](*arguments)
        except ConfigError as error:
            return "refused", str(error)
        except Exception as error:
            return "crashed", f"{name} raised {type(error).__name__}: {error}"

    return handle
