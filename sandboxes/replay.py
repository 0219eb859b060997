"""What was done to a sandbox, in order, so that it can be done again to a fresh one, with the same outcome.

Invariant: an action is in the log only if it was carried out and its outcome is known. Where an outcome depends on the
moment (a command cut off by its timeout, a call that was cancelled), the log is spoiled: nothing can be rebuilt from
it, and it says why. A replay that comes out differently stops there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentkit.errors import SandboxLost
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.types import ExecResult

LOG_LIMIT = 256 * 2**20
"""Bytes of file contents and standard input that a log holds."""


def digest(result: Any) -> str:
    """What two runs of one action must have in common: exit code and output of a command."""
    if not isinstance(result, ExecResult):
        return ""
    seen = hashlib.sha256(f"{result.exit_code} {len(result.stdout_bytes)} ".encode())
    seen.update(result.stdout_bytes)
    seen.update(result.stderr_bytes)
    return seen.hexdigest()[:16]


@dataclass(frozen=True)
class Action:
    """Something that was done, and how it came out."""

    name: str
    run: Callable[[Sandbox], Awaitable[Any]]
    outcome: str
    size: int


class ActionLog:
    """The actions since the last checkpoint."""

    def __init__(self, limit: int = LOG_LIMIT) -> None:
        self._limit = limit
        self._actions: list[Action] = []
        self._size = 0
        self.spoiled: str | None = None
        """Why nothing can be rebuilt from it."""

    def __len__(self) -> int:
        return len(self._actions)

    def record(self, name: str, run: Callable[[Sandbox], Awaitable[Any]], result: Any, size: int) -> None:
        """``run`` was carried out and gave ``result``; ``size`` bytes are kept for it."""
        if isinstance(result, ExecResult) and result.timed_out:
            self.spoil(f"{name} was cut off by its timeout: what it had done by then is not known")
        elif self._size + size > self._limit:
            self.spoil(f"more than {self._limit} bytes would have to be kept; take checkpoints in between")
        if self.spoiled is None:
            self._actions.append(Action(name, run, digest(result), size))
            self._size += size

    def spoil(self, why: str) -> None:
        self.spoiled = self.spoiled or why
        self._actions.clear()
        self._size = 0

    def clear(self) -> None:
        """Begin anew: a checkpoint holds everything so far."""
        self._actions.clear()
        self._size, self.spoiled = 0, None

    async def replay(self, box: Sandbox, index: int) -> None:
        """Do action ``index`` to ``box``. Raises ``SandboxLost`` (reason ``diverged``) if it comes out differently."""
        action = self._actions[index]
        outcome = digest(await action.run(box))
        if outcome != action.outcome:
            raise SandboxLost(
                f"action {index} ({action.name}) came out differently when it was replayed in {box.id}: the state "
                "cannot be rebuilt. Commands whose output depends on time or chance cannot be replayed",
                reason="diverged",
                step=index,
                action=action.name,
            )
