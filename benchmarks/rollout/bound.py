"""Lower bound of the time: list scheduling of the same work in virtual time, with a scheduler that costs nothing.

A turn takes an engine slot for ``ENGINE_S`` as soon as one is free, first come first served, then waits for its
environment. Groups start as soon as the async ratio allows; a training step starts as soon as enough groups are
finished (under ``wait`` also: as soon as no remaining group would become too old). This is a separate event simulation
that shares no code with the rollout loop or its gate.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from benchmarks.rollout.schedulers import Plan
from benchmarks.rollout.workload import ENGINE_S, SLOTS


class _Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.version = 0
        self.training = False
        self.waves = 0
        self.outstanding = 0
        self.tasks = itertools.count()
        self.born: dict[int, int] = {}
        self.finished: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.ready: list[int] = []
        self.free = [0.0] * SLOTS
        self.events: list[tuple[float, int, str, int, int, int]] = []
        self.serial = itertools.count()
        self.max_age = math.ceil(plan.async_ratio)
        self.capacity = math.floor((1 + plan.async_ratio) * plan.groups) + plan.extra_groups

    def run(self) -> float:
        self.admit()
        while self.waves < self.plan.waves:
            self.now, _, kind, task, member, turn = heapq.heappop(self.events)
            if kind == "trained":
                self.training = False
                self.version += 1
                self.waves += 1
                self.outstanding -= self.plan.groups
            elif task not in self.cancelled:
                self.turn(task, member, turn)
            self.train()
            self.admit()
        return self.now

    def at(self, when: float, kind: str, task: int = 0, member: int = 0, turn: int = 0) -> None:
        heapq.heappush(self.events, (when, next(self.serial), kind, task, member, turn))

    def admit(self) -> None:
        while self.outstanding < self.capacity and not (self.training and self.max_age == 0):
            task = next(self.tasks)
            self.outstanding += 1
            self.born[task] = self.version
            self.finished[task] = 0
            for member in range(self.plan.size + self.plan.extra_members):
                self.at(self.now, "turn", task, member, 0)

    def turn(self, task: int, member: int, turn: int) -> None:
        if self.finished[task] == self.plan.size:
            return  # this member is redundant by now
        if turn < self.plan.load.turns:
            answered = max(self.now, self.free[0]) + ENGINE_S
            heapq.heapreplace(self.free, answered)
            self.at(answered + self.plan.load.env_seconds(task, member)[turn], "turn", task, member, turn + 1)
            return
        self.finished[task] += 1
        if self.finished[task] == self.plan.size:
            self.ready.append(task)

    def train(self) -> None:
        if self.training or len(self.ready) < self.plan.groups:
            return
        batch = sorted(self.ready, key=lambda task: (self.born[task], self.ready.index(task)))[: self.plan.groups]
        rest = sorted((task for task in self.born if task not in batch), key=lambda task: self.born[task])
        surplus = max([0, *self._oversubscription(rest)])
        if self.plan.policy == "wait" and surplus > self.plan.extra_groups:
            return
        for task in rest[:surplus]:
            self.cancelled.add(task)
            del self.born[task]
            self.outstanding -= 1
        self.ready = [task for task in self.ready if task in self.born and task not in batch]
        for task in batch:
            assert self.version - self.born.pop(task) <= self.max_age
        self.training = True
        self.at(self.now + self.plan.train_s, "trained")

    def _oversubscription(self, rest: list[int]) -> Iterator[int]:
        for count, task in enumerate(rest, start=1):
            yield count - self.plan.groups * (self.born[task] + self.max_age - self.version)


def list_schedule(plan: Plan) -> float:
    """Return seconds until the last wave of ``plan`` is trained on if scheduling is free and nothing fails."""
    return _Simulation(plan).run()
