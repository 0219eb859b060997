"""The rollout loop: groups through the gate, batches out.

Invariant: every episode that is started ends exactly once, with one call of ``on_episode``: trained on, dropped by the
gate, cancelled as redundant, or voided because an environment failed. ``groups.py`` plays the episodes. A group that is
voided is replaced; an engine's failure ends the run. The gate decides which groups are too old.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from agentkit.config import RunConfig
from agentkit.errors import EngineError
from agentkit.trainers.algorithms.signal import carries_signal
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.rollout.counters import FILTERED, ZERO_SIGNAL, RolloutCounters
from agentkit.trainers.rollout.episode import EpisodeRules
from agentkit.trainers.rollout.garbage import CalmCollector
from agentkit.trainers.rollout.gate import Gate, Take
from agentkit.trainers.rollout.groups import SHUTDOWN, Ending, GroupPlayer, GroupRun, OnEpisode
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.player import make_player
from agentkit.trainers.rollout.plugin import group_filter
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.sandbox_report import OnEvent, SandboxReport, name_of
from agentkit.trainers.rollout.source import EnvSource
from agentkit.trainers.rollout.tasks import TaskCursor
from agentkit.trainers.weights.base import Weights
from agentkit.types import Group


class RolloutLoop:
    """Collects batches of groups for one run. Use it from one event loop: ``start``, then ``next_batch`` and
    ``publish`` in turn, then ``close``. ``next_batch`` raises errors that end an episode's task: ``EngineError``,
    ``ConfigError``, ``PluginError``, ``EnvFailureBudgetExceeded``."""

    def __init__(
        self,
        config: RunConfig,
        engine: InferenceEngine,
        renderer: ChatRenderer,
        parser: AnswerParser,
        *,
        on_episode: OnEpisode = lambda trajectory, ending, reason: None,
        on_event: OnEvent = lambda kind, **fields: None,
    ) -> None:
        rollout = config.rollout
        source = EnvSource.of(config.env)
        self._engine = engine
        self._rollout = rollout
        self._algorithm = config.algorithm
        self._keeps = group_filter(rollout)
        self._deterministic = config.deterministic
        self._on_episode = on_episode
        self.gate = Gate(rollout.groups, rollout.async_ratio, extra=rollout.extra_groups, policy=config.gate.policy)
        self._counters = RolloutCounters(config.algorithm)
        members = rollout.group_size + rollout.extra_members
        self._player = GroupPlayer(
            config,
            make_player(config, engine, renderer, parser, EpisodeRules.of(config, source)),
            window=max(100, 4 * self.gate.capacity * members),
            counters=self._counters,
            on_episode=on_episode,
            on_complete=self._complete,
            on_lost=self._lose,
            on_error=self._stop,
        )
        self._pool = self._player.pool
        self._recoveries: Counter[str] = Counter()
        """Environments that were replaced within their episodes, by cause, as last reported."""
        self._sandboxes = SandboxReport(on_event, self._pool.recoveries, lambda: self._pool.spares)
        self._tasks = TaskCursor(config.env.first_seed, config.env.num_tasks)
        self._next_group = 0
        self._groups: dict[int, GroupRun] = {}
        self._wake = asyncio.Event()
        self._running = False
        self._failure: BaseException | None = None
        self._collector = CalmCollector()

    # -- the life of a run ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start episodes; groups of a restored state come first."""
        self._collector.start()
        self._sandboxes.start()
        self._running = True
        for group_id in self.gate.running:
            self._player.play(self._groups[group_id])
        self._admit()

    async def next_batch(self) -> list[Group]:
        """Wait for the gate and return the groups of this version's training step, by group id."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._deterministic and not self.gate.running:
                self._refill(sorted(self.gate.ready))
            take = self.gate.take()
            if take is not None:
                return self._consume(take)
            self._wake.clear()
            await self._wake.wait()

    async def publish(self, weights: Weights) -> None:
        """Serve ``weights``; this ends the training of the last batch.

        Turns in flight are generated again or continue, according to ``rollout.in_flight``.
        """
        was_running, self._running = self._running, False
        await self._engine.pause("abort" if self._rollout.in_flight == "retry" else "keep")
        served = await self._engine.update_weights(weights)
        if served != weights.version:
            raise EngineError(f"the engine serves version {served} after an update to {weights.version}")
        self.gate.published(weights.version)
        await self._engine.resume()
        self._running = was_running
        self._admit()

    async def close(self) -> None:
        """Cancel running episodes (they end as ``cancelled``, reason ``shutdown``) and close all environments.

        Idempotent.
        """
        self._running = False
        for group in list(self._groups.values()):
            self._end(group, *SHUTDOWN)
        await self._player.close()
        await self._sandboxes.close()
        self._collector.stop()

    def under_way(self) -> str:
        """Return the numbers of finished and of running episodes. Thread-safe."""
        finished = sum(len(group.done) for group in tuple(self._groups.values()))
        return f"{finished} finished, {len(self._player.alive)} being played"

    def metrics(self) -> dict[str, float]:
        """Return counts and means since the last call, and the numbers of groups in the gate now."""
        before, self._recoveries = self._recoveries, Counter()
        for (cause, _, _), number in self._pool.recoveries.recoveries.items():
            self._recoveries[name_of(cause)] += number
        new = self._recoveries - before
        recovered: dict[str, float] = {}
        if self._pool.source.recovery == "replay":
            recovered = {"rollout/env_replays": float(new.total())}
            recovered |= {f"rollout/env_replays/{cause}": float(number) for cause, number in new.items()}
        gate = {"gate/running": float(len(self.gate.running)), "gate/ready": float(len(self.gate.ready))}
        return {**self._counters.snapshot(), **gate, **recovered, **self._sandboxes.metrics()}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between ``publish`` and ``next_batch``: JSON-able except for ``groups``.

        Ready groups are kept whole; running ones are stored as id and seed, and played again.
        """
        ready = set(self.gate.ready)
        return {
            "gate": self.gate.state(),
            "tasks": self._tasks.position,
            "next_group": self._next_group,
            "running": [[group.id, group.seed] for group in self._groups.values() if group.id not in ready],
            "groups": [self._groups[group_id].result() for group_id in self.gate.ready],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a ``state``; call this before ``start``."""
        if self._running or self._groups:
            raise RuntimeError("restore a state before start")
        self.gate.load(state["gate"])
        started = {int(group_id): int(version) for group_id, version in state["gate"]["started"]}
        self._tasks.position = int(state["tasks"])
        self._next_group = int(state["next_group"])
        for group_id, seed in state["running"]:
            self._groups[group_id] = self._new(group_id, seed, started[group_id])
        for group in state["groups"]:
            ready = self._groups[group.group_id] = self._new(group.group_id, group.seed, group.version_started)
            ready.done = list(group.members)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._running and self.gate.room() > 0:
            group = self._new(self._next_group, self._tasks.next(), self.gate.version)
            self._next_group += 1
            self.gate.start(group.id)
            self._groups[group.id] = group
            self._player.play(group)

    def _new(self, group_id: int, seed: int, version: int) -> GroupRun:
        return GroupRun(group_id, seed, version, self._rollout.group_size, self._rollout.extra_members)

    def _stop(self, group: GroupRun, error: BaseException) -> None:
        """Stop after an error that is not an environment's."""
        if self._failure is None:
            self._failure = error
            self._running = False
            self._wake.set()

    def _complete(self, group: GroupRun) -> None:
        """Offer a complete group to the learner."""
        self.gate.finish(group.id)
        if not self._deterministic:
            self._refill([group.id])
        self._wake.set()

    def _lose(self, group: GroupRun) -> None:
        """Void a group that cannot be complete any more, and replace it."""
        self.gate.remove(group.id)
        self._end(group, "voided", "group")
        self._admit()
        self._wake.set()

    def _refill(self, ready: list[int]) -> None:
        """Replace ready groups that carry no signal or that the filter refuses, within the budget of the step."""
        if not self._rollout.dynamic_sampling and self._rollout.filter is None:
            return
        budget = self._rollout.max_refills * self._rollout.groups
        for group_id in ready:
            group = self._groups[group_id]
            if self._counters.refills >= budget or (reason := self._refusal(group)) is None:
                continue
            self._counters.refilled(reason)
            self.gate.remove(group_id)
            self._end(group, "dropped", reason)
        self._admit()

    def _refusal(self, group: GroupRun) -> str | None:
        """Return why a complete group is replaced; None if it is used."""
        if self._rollout.dynamic_sampling and not carries_signal(group.done, self._algorithm):
            return ZERO_SIGNAL
        return None if self._keeps(group.result()) else FILTERED

    def _consume(self, take: Take) -> list[Group]:
        for group_id in take.cancelled:
            self._end(self._groups[group_id], "cancelled", "redundant_group")
        for group_id in take.dropped:
            self._end(self._groups[group_id], "dropped", "stale")
        batch = []
        for group_id in sorted(take.batch):
            group = self._groups.pop(group_id).result()
            self._counters.trained(group, self.gate.staleness(group_id))
            for trajectory in group.members:
                self._on_episode(trajectory, "trained", "")
            batch.append(group)
        self._admit()
        return batch

    def _end(self, group: GroupRun, ending: Ending, reason: str) -> None:
        """Discard a group and all of its members; the gate has removed it already."""
        del self._groups[group.id]
        self._player.end(group, ending, reason)
