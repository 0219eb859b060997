"""Records of finished recoveries and of hedged calls.

Invariant: each recovery is recorded once, when its target answers again; a recovery that is given up is not recorded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentkit.sandboxes import telemetry

Means = Literal["standby", "spare", "new", "restart", "snapshot"]
"""The replacement of a lost target: a standby, a ready spare, a new target, the same target after a restart, or a new
target with the files of a snapshot."""


@dataclass(frozen=True)
class Recovery:
    """One finished recovery."""

    cause: str
    """One of ``errors.LOSS_REASONS``, or the name of the error that ended the target, such as ``EnvTimeout``."""
    by: Means
    seconds: float
    """Time from the detection of the loss until the target answers again."""
    host: str
    """Host of the target that was lost."""
    sandbox: str = ""
    """Id of the sandbox that was lost, or in which the target failed; empty if the target had none."""
    error: str = ""
    """Message of the error that ended the target, if a call raised one."""


class RecoveryLog:
    """Counts the recoveries and hedged calls of one run.

    Args:
        listener: called with each recovery; must neither block nor raise. Default: the telemetry of this process.

    Attributes:
        recoveries: number of recoveries by ``(cause, by, host)``.
        seconds: time lost to recoveries by ``(cause, by, host)``.
        recent: the last 1000 recoveries.
        hedged: number of calls by operation for which a second attempt was started.
        won: number of these whose second attempt succeeded first.
        standbys: number of standbys that follow a target now.
    """

    def __init__(self, listener: Callable[[Recovery], None] = telemetry.report) -> None:
        self._listener = listener
        self.recoveries: Counter[tuple[str, Means, str]] = Counter()
        self.seconds: dict[tuple[str, Means, str], float] = {}
        self.recent: deque[Recovery] = deque(maxlen=1000)
        self.hedged: Counter[str] = Counter()
        self.won: Counter[str] = Counter()
        self.standbys = 0

    @property
    def total(self) -> int:
        """Number of recoveries."""
        return self.recoveries.total()

    def add(self, recovery: Recovery) -> None:
        """Record a finished recovery."""
        key = (recovery.cause, recovery.by, recovery.host)
        self.recoveries[key] += 1
        self.seconds[key] = self.seconds.get(key, 0.0) + recovery.seconds
        self.recent.append(recovery)
        self._listener(recovery)
