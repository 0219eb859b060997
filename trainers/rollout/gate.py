"""The async-ratio gate: which groups may start, which are trained on, which are too old. No I/O.

Let ``B`` be the groups of a batch, ``a`` the async ratio, ``K = ceil(a)``, ``E`` the redundant groups and ``v`` the
learner's version, that is the number of published weights. A group that starts at version ``s`` must be consumed while
``v <= s + K``: its *deadline*. Every version consumes one batch, so ``(d - v) * B`` groups can still be consumed at the
versions ``v+1 … d`` once the batch of ``v`` has been taken: the *slots* up to ``d``.

Invariants for any order in which groups finish, fail or are refilled:

- bound: a consumed group has staleness ``v - s <= K``; ``a = 0`` is exactly synchronous;
- pacing: started but not yet published groups number at most ``floor((1 + a) * B) + E``;
- no loss: every started group ends exactly once: consumed, voided, cancelled as surplus or (``drop``) expired;
- no deadlock: once every running group has finished, ``take`` returns a batch, or ``room`` is positive.

Why ``wait`` never has to break the bound: after a take, the groups that remain number at most ``(d - v) * B`` for every
deadline ``d`` (``take`` waits until it can choose such a batch). Groups that start later have the latest deadline,
``v + K``, and pacing keeps the total at ``floor(a * B) + E <= K * B + E`` while a batch is trained. So at the next take
no deadline is oversubscribed by more than ``E`` beyond ``B``: taking the ``B`` earliest deadlines and cancelling at
most ``E`` surplus groups always suffices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Take:
    """Group ids that one ``take`` consumed, cancelled or dropped."""

    batch: tuple[int, ...]
    """Groups to train on, by deadline, then in the order of completion."""
    cancelled: tuple[int, ...]
    """Surplus redundant groups: no slot is left for them."""
    dropped: tuple[int, ...]
    """Groups that are too old for all later slots (policy ``drop`` only)."""


class Gate:
    """The gate of one run. One batch at a time is in training: ``take``, then ``published``, then ``take`` again."""

    def __init__(
        self,
        batch: int,
        async_ratio: float,
        *,
        extra: int = 0,
        policy: Literal["wait", "drop"] = "wait",
        version: int = 0,
    ) -> None:
        # Exact decimal arithmetic: 1.15 * 100 is 115, not 114.99….
        ratio = Fraction(repr(float(async_ratio)))
        if batch < 1 or ratio < 0 or extra < 0:
            raise ValueError(f"batch={batch} must be >= 1, async_ratio={async_ratio} and extra={extra} >= 0")
        self.batch = batch
        self.extra = extra
        self.policy: Literal["wait", "drop"] = policy
        self.version = version
        self.max_staleness = math.ceil(ratio)
        self.capacity = math.floor((1 + ratio) * batch) + extra
        self._started: dict[int, int] = {}
        """Running and ready groups with the versions at which they started, in the order of starting."""
        self._ready: dict[int, None] = {}
        """Ready groups, in the order of completion."""
        self._training: dict[int, int] = {}

    @property
    def running(self) -> list[int]:
        return [group for group in self._started if group not in self._ready]

    @property
    def ready(self) -> list[int]:
        return list(self._ready)

    @property
    def training(self) -> list[int]:
        return list(self._training)

    def deadline(self, group: int) -> int:
        """Return the last version at which ``group`` may be consumed."""
        return self._started[group] + self.max_staleness

    def room(self) -> int:
        """Return how many groups may start now."""
        slots = self._slots(self.version + self.max_staleness)
        usable = slots + self.extra if slots else 0
        return max(0, min(self.capacity - len(self._training), usable) - len(self._started))

    def start(self, group: int, *, version: int | None = None) -> None:
        """Start a group. ``version`` is given only for a group that started before a checkpoint."""
        if group in self._started or group in self._training:
            raise ValueError(f"group {group} has started already")
        self._started[group] = self.version if version is None else version

    def finish(self, group: int) -> None:
        """Mark a running group as complete."""
        if group not in self._started or group in self._ready:
            raise ValueError(f"group {group} is not running")
        self._ready[group] = None

    def remove(self, group: int) -> None:
        """Remove a group that is not consumed: voided, or without signal. Its slot is free at once."""
        del self._started[group]
        self._ready.pop(group, None)

    def take(self) -> Take | None:
        """Return the batch of this version, or None if it is not complete yet."""
        if self._training:
            raise RuntimeError("the previous batch has not been published yet: one batch is trained at a time")
        usable = [group for group in self._ready if self.deadline(group) >= self.version]
        if len(usable) < self.batch:
            return None
        batch = sorted(usable, key=self.deadline)[: self.batch]  # stable: within a deadline, by completion
        chosen = set(batch)
        left = [group for group in self._started if group not in chosen]
        # Earliest deadline first, running before ready, youngest first: cancelling these wastes the least work.
        left.sort(key=lambda group: (self.deadline(group), group in self._ready, -group))
        if self.policy == "wait":
            surplus = self._excess(left)
            if surplus > self.extra:
                return None
            cancelled, dropped = left[:surplus], []
        else:
            late = [group for group in left if self.deadline(group) <= self.version]
            cancelled, dropped = late[: self.extra], late[self.extra :]
        for group in batch:
            self._training[group] = self._started[group]
        for group in (*batch, *cancelled, *dropped):
            self.remove(group)
        return Take(tuple(batch), tuple(cancelled), tuple(dropped))

    def staleness(self, group: int) -> int:
        """Return the versions between the start of a group in training and its consumption."""
        return self.version - self._training[group]

    def published(self, version: int) -> None:
        """Record that new weights are served; this ends the training of the batch that was taken, if any."""
        if self._started and not self._training:
            raise RuntimeError(
                "weights were published without a batch in training while groups are under way: their deadlines would "
                "pass unused"
            )
        if self._training and version != self.version + 1:
            raise ValueError(f"version {version} published after {self.version}: each batch produces one version")
        if version < self.version:
            raise ValueError(f"version {version} published after {self.version}: versions never go back")
        self.version = version
        self._training.clear()

    def state(self) -> dict[str, Any]:
        """Return the state between ``published`` and ``take`` for a checkpoint: JSON-able, restored by ``load``."""
        if self._training:
            raise RuntimeError("a batch is in training: save after its weights are published")
        return {"version": self.version, "started": list(self._started.items()), "ready": list(self._ready)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; groups that were running count as running again."""
        self.version = int(state["version"])
        self._started = {int(group): int(version) for group, version in state["started"]}
        self._ready = {int(group): None for group in state["ready"]}
        self._training = {}

    def _slots(self, deadline: int) -> int:
        """Return how many groups can still be consumed up to the version ``deadline``."""
        return self.batch * (deadline - self.version + (0 if self._training else 1))

    def _excess(self, groups: Iterable[int]) -> int:
        """Return by how much ``groups``, sorted by deadline, exceed the slots that remain after this take."""
        worst = 0
        for count, group in enumerate(groups, start=1):
            worst = max(worst, count - self.batch * (self.deadline(group) - self.version))
        return worst
