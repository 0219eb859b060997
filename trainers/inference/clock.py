"""Time during which an engine computes.

Invariant: ``busy_s`` grows exactly while at least one request is in flight and the engine is not paused, ``request_s``
as many times as fast as there are requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyClock:
    """Counts the seconds with at least one request between ``enter`` and ``leave``, without pauses."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._in_flight = 0
        self._paused = False
        self._total = self._request_total = 0.0
        self._since = 0.0

    @property
    def busy_s(self) -> float:
        """Return the seconds so far, including the current period."""
        return self._total + (self._now() - self._since if self._runs else 0.0)

    @property
    def request_s(self) -> float:
        """Return the sum of these seconds over the requests in flight."""
        return self._request_total + (self._in_flight * (self._now() - self._since) if self._runs else 0.0)

    def enter(self) -> None:
        self._change(in_flight=self._in_flight + 1)

    def leave(self) -> None:
        self._change(in_flight=self._in_flight - 1)

    def pause(self) -> None:
        self._change(paused=True)

    def resume(self) -> None:
        self._change(paused=False)

    @property
    def _runs(self) -> bool:
        return self._in_flight > 0 and not self._paused

    def _change(self, *, in_flight: int | None = None, paused: bool | None = None) -> None:
        self._total, self._request_total, now = self.busy_s, self.request_s, self._now()
        self._since = now
        self._in_flight = self._in_flight if in_flight is None else in_flight
        self._paused = self._paused if paused is None else paused
