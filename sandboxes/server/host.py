"""Decide whether the machine of a sandbox server accepts more sandboxes.

Invariant: a machine that is draining or above a watermark refuses creations and nothing else; its sandboxes continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agentkit.errors import QuotaExceeded
from agentkit.sandboxes.pool.health import HostUsage, pressure

_NEW_SHARE = 0.3
"""Weight of the newest measurement of the processors, whose use changes from one moment to the next."""


class Host:
    """The machine of a sandbox server.

    Attributes:
        draining: whether an operator has stopped creations.
        usage: the last measurement; ``cpu`` is averaged over some seconds.
    """

    def __init__(self, watermarks: Mapping[str, float], measure: Callable[[], HostUsage]) -> None:
        """Measure the machine.

        Args:
            watermarks: shares by field of ``HostUsage`` from which creations are refused.
            measure: returns the shares that are in use.
        """
        self.watermarks = watermarks
        self.draining = False
        self._measure = measure
        self._pressure: str | None = None
        self.usage = measure()
        self.update()

    def update(self) -> None:
        """Measure the machine again."""
        now, average = self._measure(), self.usage.cpu
        self.usage = replace(now, cpu=average + _NEW_SHARE * (now.cpu - average))
        self._pressure = pressure(self.usage, self.watermarks, already=self._pressure is not None)

    @property
    def reason(self) -> str:
        """Why no sandbox is created; empty if the machine accepts more."""
        return "the server is draining" if self.draining else self._pressure or ""

    def check(self) -> None:
        """Raise ``QuotaExceeded``, which another server or a later attempt resolves, if no sandbox may be created."""
        if self.reason:
            raise QuotaExceeded(f"this server accepts no new sandboxes: {self.reason}")

    def describe(self) -> dict[str, Any]:
        """Return the state as plain data, as clients get it."""
        return {**vars(self.usage), "accepting": not self.reason, "reason": self.reason}
