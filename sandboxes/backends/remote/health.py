"""Judge from what a client hears of a sandbox server whether the server is up, silent or down.

Invariant: pure; the time is an argument. Only refused connections and silence count against a server, and silence
counts only as far as the client itself was on time; neither counts while it restarts as it has announced. A server that
goes down repeatedly is not trusted for a growing time after each return.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.server.protocol import HEARTBEAT_SECONDS

Reachability = Literal["up", "silent", "restarting", "down"]

PATIENCE = 4.0
"""Seconds of silence after which a server counts as down. The rest of the five seconds in which a lost host is replaced
is for the replacement; a server whose processors are overloaded is late by less."""
TICK = 0.2
"""Seconds between two calls of ``HostHealth.pass_time``. A late call counts as twice that: the client was late."""
REFUSED = 0.2
"""Seconds of refused connections after which a server counts as down."""
SUSPICIOUS = 1.75 * HEARTBEAT_SECONDS
"""Seconds of silence after which the client asks the server whether it runs, and prefers other servers."""
_MEMORY = 600.0
"""Seconds for which it is remembered that a server went down."""
_PROBATION = Backoff(base=10.0, factor=3.0, cap=300.0)
"""Seconds without trust after the second, third, … return. The first return may be an upgrade."""


class HostHealth:
    """Whether one server can be reached. A new one is down.

    Attributes:
        state: ``up``, ``silent`` (not heard for some time), ``restarting`` (it will be back soon) or ``down``.
        reason: why the server is not up.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self.state: Reachability = "down"
        self.reason = "it has not answered yet"
        self._patience = patience
        self._silence = 0.0
        self._last: float | None = None
        self._refused_since: float | None = None
        self._losses: deque[float] = deque()
        self._trusted_from = 0.0
        self._back_until = 0.0

    def trusted(self, now: float) -> bool:
        """Return whether to prefer this server to one that is silent, or that returned shortly before."""
        return self.state == "up" and now >= self._trusted_from

    def connect(self, now: float) -> None:
        """The server has accepted this client."""
        if self.state == "down":
            while self._losses and now - self._losses[0] > _MEMORY:
                self._losses.popleft()
            repeated = len(self._losses) - 1
            self._trusted_from = now + (_PROBATION.ceiling(repeated) if repeated > 0 else 0.0)
        self.state, self.reason = "up", ""
        self._silence, self._last, self._refused_since = 0.0, now, None

    def announce_restart(self, now: float, seconds: float) -> None:
        """The server has announced that it ends and is back within this time."""
        self.state, self.reason = "restarting", "it restarts"
        self._back_until = now + seconds

    def hear(self) -> None:
        """Data has arrived from the server."""
        self._silence, self._refused_since = 0.0, None
        if self.state == "silent":
            self.state, self.reason = "up", ""

    def refuse(self, now: float) -> None:
        """The server's machine has refused a connection."""
        if self.state == "restarting":
            return
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since >= REFUSED:
            self._lose(now, "it refuses connections")

    def pass_time(self, now: float) -> None:
        """Count the time since the last call as silence; called every ``TICK`` seconds."""
        if self.state == "restarting":
            if now >= self._back_until:
                self._lose(now, "it did not come back from its restart")
            return
        if self._last is not None:
            self._silence += min(now - self._last, 2 * TICK)
        self._last = now
        if self.state == "up" and self._silence >= min(SUSPICIOUS, self._patience / 2):
            self.state = "silent"
        if self.state == "silent":
            self.reason = f"it has been silent for {self._silence:.1f} s"
            if self._silence >= self._patience:
                self._lose(now, self.reason)

    def _lose(self, now: float, reason: str) -> None:
        if self.state != "down":
            self._losses.append(now)
        self.state, self.reason = "down", reason
