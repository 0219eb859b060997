"""Pure decisions of the scheduler: how many sandboxes to create, which to retire, and when creation may be retried."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil
from typing import Literal

from agentkit.sandboxes.backoff import Backoff, FailureStreak
from agentkit.sandboxes.pool.slots import Slot, Slots

ENGINE_FAILURES = 3
"""Creations in a row that the engine may fail; at the next failure the breaker opens."""
CRASH_LOOP = 3
"""Rounds in a row in which sandboxes failed for another reason, or died at once, before callers get the cause at once
instead of waiting."""
RESTARTS = Backoff(factor=6.0, least=2 / 3)
"""Delays between these rounds: three short ones, then two or three rounds a minute."""
FULL = Backoff(cap=5.0)
"""Delays between creations while the engine has no room."""
PROVEN_AFTER = 10.0
"""Seconds of life after which a sandbox shows that creation works."""
SURPLUS_AFTER = 60.0
"""Seconds after which idle sandboxes beyond ``min_idle`` are removed."""


OnExhausted = Literal["wait", "fail", "create"]


@dataclass(frozen=True)
class PoolSettings:
    """See ``SandboxPool``."""

    min_idle: int
    max_size: int
    max_uses: int | None
    max_age: float
    refill_concurrency: int | None
    on_exhausted: OnExhausted


def creations(slots: Slots, waiting: int, settings: PoolSettings, *, at_once: int, one_by_one: bool) -> int:
    """Return how many creations to start now.

    Args:
        slots: the slots of the pool.
        waiting: number of callers that wait for a sandbox.
        settings: those of the pool.
        at_once: number of concurrent creations while callers wait.
        one_by_one: whether a new sandbox must have proven itself before the next creation.
    """
    concurrency = settings.refill_concurrency or max(1, ceil(0.2 * settings.min_idle))
    if waiting:
        concurrency = max(concurrency, at_once)
    number = min(
        waiting + settings.min_idle - slots.available,
        slots.free,
        concurrency - slots.count("creating"),
        # If the engine stops removing, sandboxes must not accumulate beyond the pool.
        settings.max_size - slots.count("removing"),
    )
    if one_by_one:
        on_trial = any(slot.state in ("creating", "idle", "checking") and not slot.proven for slot in slots)
        number = min(number, 0 if on_trial else 1)
    return max(0, number)


def to_retire(slots: Slots, settings: PoolSettings, now: float) -> list[tuple[Slot, str]]:
    """Return the idle slots that are too old or not needed, with the reason."""
    surplus = slots.count("idle") - settings.min_idle
    retired = []
    for slot in slots.idle():
        if now - slot.opened >= settings.max_age:
            retired.append((slot, "old"))
        elif surplus > 0 and now - slot.since >= SURPLUS_AFTER:
            retired.append((slot, "surplus"))
            surplus -= 1
    return retired


def why_not_reused(slot: Slot, settings: PoolSettings, now: float) -> str:
    """Return why a healthy sandbox is replaced after a use; empty if it is reset and reused."""
    if slot.extra or (settings.max_uses is not None and slot.uses >= settings.max_uses):
        return "used"
    return "old" if now - slot.opened >= settings.max_age else ""


class CreationFailures:
    """Failures of creations in a row, by origin: the engine, which fails or is full, or the sandboxes."""

    def __init__(self, rng: random.Random) -> None:
        self._engine = FailureStreak(rng)
        self._full = FailureStreak(rng, FULL)
        self._sandboxes = FailureStreak(rng, RESTARTS)
        self._died = False
        """Whether a sandbox died right after its creation: then only one that lives ends the streak."""

    @property
    def count(self) -> int:
        """Failures of sandboxes in a row."""
        return self._sandboxes.count

    @property
    def not_before(self) -> float:
        """Time of the next creation."""
        return max(self._engine.not_before, self._full.not_before, self._sandboxes.not_before)

    @property
    def last_error(self) -> Exception | None:
        return self._engine.error or self._full.error or self._sandboxes.error

    @property
    def one_by_one(self) -> bool:
        """Whether to create one sandbox at a time. The first round may be an accident: all are replaced at once."""
        return self._sandboxes.count > 1

    def crash_loop(self, now: float) -> float | None:
        """Return the seconds until the next round if all new sandboxes fail, else None."""
        wait = self._sandboxes.not_before - now
        return wait if self._sandboxes.count > CRASH_LOOP and wait > 0 else None

    def engine_failed(self, error: Exception, now: float) -> str:
        """Count a failure of the engine; return why the breaker must open, or an empty string."""
        self._engine.add(error, now)
        if self._engine.count <= ENGINE_FAILURES:
            return ""
        return f"{self._engine.count} creations in a row failed, the last with: {error}"

    def sandbox_failed(self, error: Exception, now: float, began: float, *, died: bool = False) -> None:
        """Count a failure of a creation that began at ``began``."""
        self._sandboxes.add(error, now, began=began)
        self._died |= died

    def engine_full(self, error: Exception, now: float, began: float) -> None:
        """Count a creation, begun at ``began``, that the engine refused for lack of room. Callers wait for room."""
        self._full.add(error, now, began=began)

    def engine_worked(self) -> None:
        self._engine.clear()
        self._full.clear()

    def sandbox_started(self) -> None:
        if not self._died:
            self._sandboxes.clear()

    def sandbox_lived(self) -> None:
        self._died = False
        self._sandboxes.clear()
