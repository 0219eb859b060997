"""What goes wrong with a pretended back end, and when: a script and the dice that it asks for.

Invariant: the same script, seed and order of calls give the same faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["pull", "create", "start", "ready"]
PHASES: tuple[Phase, ...] = ("pull", "create", "start", "ready")


@dataclass
class Fault:
    """What happens to calls that match.

    ``fail``: the call fails as a real one would (``ImageError`` while pulling, ``StartTimeout`` while starting,
    ``EngineUnavailable`` for other calls to the engine; a call to a sandbox loses the connection). ``slow``: it takes
    ``seconds`` more. ``hang``: it goes on until its own limit (``start_timeout``, the timeout of a command or a ping,
    30 s of the engine). ``die``: ``seconds`` into the call its sandbox dies with exit code 137. ``oom``: the same, by
    the memory limit. ``taint``: the processes of this command survive their kill.
    """

    op: str
    does: Literal["fail", "slow", "hang", "die", "oom", "taint"]
    phase: Phase | None = None
    """Of ``create`` and ``restart``: when; any phase by default means ``start``."""
    seconds: float = 0.0
    times: int | None = 1
    """How often, then never again; None always."""
    skip: int = 0
    """Matching calls that are let pass first."""
    id: str | None = None
    """Only for this sandbox."""
    probability: float = 1.0

    def matches(self, op: str, id: str, phase: Phase | None) -> bool:
        if self.times == 0 or self.op not in (op, "*") or self.id not in (id, None):
            return False
        return phase is None or (self.phase or "start") == phase


class Script:
    """Faults that are in store, used up by the calls that they meet."""

    def __init__(self, seed: int, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        self._random = random.Random(seed)

    def drawn(self, op: str, id: str, phase: Phase | None = None) -> list[Fault]:
        """The faults that this call meets."""
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
