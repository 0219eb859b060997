"""Rules that say which calls to a fake back end fail, and how."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["pull", "create", "start", "ready"]
PHASES: tuple[Phase, ...] = ("pull", "create", "start", "ready")


@dataclass
class Fault:
    """A fault of the calls that match.

    ``does`` is one of:

    - ``fail``: the call fails as a real one would: ``ImageError`` while pulling, ``StartTimeout`` while starting,
      ``EngineUnavailable`` for other calls to the engine; a call to a sandbox loses the connection.
    - ``slow``: the call takes ``seconds`` more.
    - ``hang``: the call lasts until its own limit: ``start_timeout``, the timeout of a command or a ping, 30 s of the
      engine.
    - ``die``: the sandbox dies with exit code 137, ``seconds`` after the call begins.
    - ``oom``: the same, by the memory limit.
    - ``taint``: the processes of this command survive their kill.
    """

    op: str
    """The name of a method of ``Backend`` or ``Channel``, or ``"*"`` for all."""
    does: Literal["fail", "slow", "hang", "die", "oom", "taint"]
    phase: Phase | None = None
    """The phase of ``create`` and ``restart``; None means ``start``."""
    seconds: float = 0.0
    times: int | None = 1
    """How many calls it meets; None means all."""
    skip: int = 0
    """How many matching calls pass before the first one that it meets."""
    id: str | None = None
    """The sandbox; None means all."""
    probability: float = 1.0

    def matches(self, op: str, id: str, phase: Phase | None) -> bool:
        if self.times == 0 or self.op not in (op, "*") or self.id not in (id, None):
            return False
        return phase is None or (self.phase or "start") == phase


class Rules:
    """The faults that may still happen. The same seed, faults and order of calls give the same result."""

    def __init__(self, seed: int, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        self._random = random.Random(seed)

    def draw(self, op: str, id: str, phase: Phase | None = None) -> list[Fault]:
        """Return the faults that this call meets, and count them."""
        found = []
        for fault in self.faults:
            if not fault.matches(op, id, phase):
                continue
            if fault.skip > 0:
                fault.skip -= 1
            elif self._random.random() < fault.probability:
                fault.times = None if fault.times is None else fault.times - 1
                found.append(fault)
        return found
