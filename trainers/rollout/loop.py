"""The rollout loop: one asyncio task per episode, groups through the gate, batches out.

Invariant: every episode that is started ends exactly once, with one call of ``on_episode``: trained on, dropped by the
gate, cancelled as redundant, or voided because an environment failed. An environment's failure costs a retry, then the
group; an unexplained crash of a sandbox under the policy's code costs one more attempt, then counts as the policy's
failure and is trained on; an engine's failure ends the run. The gate decides which groups are too old.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from agentkit.config import RunConfig, attempts
from agentkit.errors import EngineError, EnvError, EnvFailureBudgetExceeded, PluginError, UnexplainedCrash
from agentkit.trainers.algorithms.signal import carries_signal
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.rollout.counters import FILTERED, ZERO_SIGNAL, RolloutCounters
from agentkit.trainers.rollout.episode import EpisodeRules, Player
from agentkit.trainers.rollout.failures import Attempts, FailureBudget, fail, void
from agentkit.trainers.rollout.garbage import CalmCollector
from agentkit.trainers.rollout.gate import Gate, Take
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.plugin import group_filter, reward_shaping
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.sandbox_report import OnEvent, SandboxReport
from agentkit.trainers.rollout.source import EnvSource
from agentkit.trainers.rollout.tasks import TaskCursor
from agentkit.trainers.weights.base import Weights
from agentkit.types import Group, Trajectory

Ending = Literal["trained", "dropped", "cancelled", "voided"]
OnEpisode = Callable[[Trajectory, Ending, str], None]
"""Called once for every started episode: the record, its ending, and the reason."""

_CLOSE_TIMEOUT = 30.0
_SHUTDOWN: tuple[Ending, str] = ("cancelled", "shutdown")


@dataclass(slots=True)
class _GroupRun:
    """A group that is running or ready."""

    id: int
    seed: int
    version: int
    done: list[Trajectory] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    lost: int = 0
    """Members that ran out of retries."""
    verdict: tuple[Ending, str] | None = None
    """Ending of members that are still running, once it is decided."""


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
        self._shape = reward_shaping(rollout)
        self._keeps = group_filter(rollout)
        self._attempts = attempts(config)
        self._deterministic = config.deterministic
        self._on_episode = on_episode
        self._pool = EnvPool(source)
        self._recoveries = 0
        self._sandboxes = SandboxReport(on_event, self._pool.recoveries, lambda: self._pool.spares)
        self._player = Player(
            engine,
            renderer,
            parser,
            EpisodeRules.of(config, source),
        )
        self.gate = Gate(rollout.groups, rollout.async_ratio, extra=rollout.extra_groups, policy=config.gate.policy)
        self._tasks = TaskCursor(config.env.first_seed, config.env.num_tasks)
        self._next_group = 0
        self._groups: dict[int, _GroupRun] = {}
        self._alive: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._running = False
        self._failure: BaseException | None = None
        self._counters = RolloutCounters(config.algorithm)
        self._collector = CalmCollector()
        members = rollout.group_size + rollout.extra_members
        self._budget = FailureBudget(rollout.max_failure_share, window=max(100, 4 * self.gate.capacity * members))

    # -- the life of a run ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start episodes; groups of a restored state come first."""
        self._collector.start()
        self._sandboxes.start()
        self._running = True
        for group_id in self.gate.running:
            self._play(self._groups[group_id])
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
            self._end(group, *_SHUTDOWN)
        if self._alive:  # an engine that ignores its cancellation must not delay the exit
            await asyncio.wait(self._alive, timeout=_CLOSE_TIMEOUT)
        await self._pool.close()
        await self._sandboxes.close()
        self._collector.stop()

    def under_way(self) -> str:
        """Return the numbers of finished and of running episodes. Thread-safe."""
        finished = sum(len(group.done) for group in tuple(self._groups.values()))
        return f"{finished} finished, {len(self._alive)} being played"

    def metrics(self) -> dict[str, float]:
        """Return counts and means since the last call."""
        before, self._recoveries = self._recoveries, self._pool.recoveries.total
        recoveries = float(self._recoveries - before)
        recovered = {"rollout/env_replays": recoveries} if self._pool.source.recovery == "replay" else {}
        return {**self._counters.snapshot(), **recovered, **self._sandboxes.metrics()}

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
            "groups": [_as_group(self._groups[group_id]) for group_id in self.gate.ready],
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
            self._groups[group_id] = _GroupRun(group_id, seed, started[group_id])
        for group in state["groups"]:
            self._groups[group.group_id] = _GroupRun(
                group.group_id, group.seed, group.version_started, done=list(group.members)
            )

    # -- groups -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._running and self.gate.room() > 0:
            group = _GroupRun(self._next_group, self._tasks.next(), self.gate.version)
            self._next_group += 1
            self.gate.start(group.id)
            self._groups[group.id] = group
            self._play(group)

    def _play(self, group: _GroupRun) -> None:
        for member in range(self._rollout.group_size + self._rollout.extra_members):
            task = asyncio.ensure_future(self._member(group, member))
            group.tasks.append(task)
            self._alive.add(task)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._alive.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._running = False
            self._wake.set()

    def _complete(self, group: _GroupRun) -> None:
        """Complete a group that has enough members; cancel the redundant rest."""
        self._cancel(group, ("cancelled", "redundant_member"))
        self.gate.finish(group.id)
        if not self._deterministic:
            self._refill([group.id])
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

    def _refusal(self, group: _GroupRun) -> str | None:
        """Return why a complete group is replaced; None if it is used."""
        if self._rollout.dynamic_sampling and not carries_signal(group.done, self._algorithm):
            return ZERO_SIGNAL
        return None if self._keeps(_as_group(group)) else FILTERED

    def _consume(self, take: Take) -> list[Group]:
        for group_id in take.cancelled:
            self._end(self._groups[group_id], "cancelled", "redundant_group")
        for group_id in take.dropped:
            self._end(self._groups[group_id], "dropped", "stale")
        batch = []
        for group_id in sorted(take.batch):
            group = _as_group(self._groups.pop(group_id))
            self._counters.trained(group, self.gate.staleness(group_id))
            for trajectory in group.members:
                self._on_episode(trajectory, "trained", "")
            batch.append(group)
        self._admit()
        return batch

    def _end(self, group: _GroupRun, ending: Ending, reason: str) -> None:
        """Discard a group and all of its members; the gate has removed it already."""
        del self._groups[group.id]
        self._cancel(group, (ending, reason))
        for trajectory in group.done:
            self._report(trajectory, ending, reason)

    def _cancel(self, group: _GroupRun, verdict: tuple[Ending, str]) -> None:
        group.verdict = verdict
        current = asyncio.current_task()
        for task in group.tasks:
            if task is not current and not task.done():
                task.cancel()
        group.tasks.clear()

    # -- members ----------------------------------------------------------------------------------------------------

    async def _member(self, group: _GroupRun, member: int) -> None:
        """Play one member; retry in a fresh environment if the environment fails."""
        source = self._player.rules.source
        attempts = Attempts(self._attempts)
        for attempt in itertools.count():
            trajectory = Trajectory(group.id, member, source.id, group.seed, group.version, attempt=attempt)
            env = self._pool.acquire(fresh=attempt > 0)
            try:
                await self._player.play(trajectory, env)
            except EnvError as error:
                self._pool.release(env, failed=True)
                if attempts.blame(error, trajectory):
                    self._counters.policy_crashes += 1
                    self._finish(group, trajectory, crash=error)
                    return
                again = attempts.again(error)
                self._void(group, trajectory, error, retried=again)
                if group.verdict is not None:
                    return
                if not again:
                    self._lose(group)
                    return
            except BaseException:
                self._pool.release(env)
                trajectory.outcome, trajectory.reason = "truncated", "interrupted"
                self._report(trajectory, *(group.verdict or _SHUTDOWN))
                raise
            else:
                self._pool.release(env)
                self._finish(group, trajectory)
                return

    def _finish(self, group: _GroupRun, trajectory: Trajectory, *, crash: EnvError | None = None) -> None:
        """Handle an episode with a result; ``crash``: the failure of which the policy is guilty."""
        self._budget.record(None, running=len(self._alive))
        try:
            self._shape(trajectory)
        except PluginError:
            self._report(trajectory, *_SHUTDOWN)
            raise
        if crash is not None:
            fail(trajectory, crash)
        if group.verdict is not None:
            self._report(trajectory, *group.verdict)
            return
        group.done.append(trajectory)
        if len(group.done) == self._rollout.group_size:
            self._complete(group)

    def _void(self, group: _GroupRun, trajectory: Trajectory, error: EnvError, *, retried: bool) -> None:
        void(trajectory, error)
        self._counters.failures += 1
        self._report(trajectory, "voided", type(error).__name__)
        if isinstance(error, EnvFailureBudgetExceeded):
            raise error
        if not isinstance(error, UnexplainedCrash):
            self._budget.record(error, running=len(self._alive))
        self._counters.retries += retried and group.verdict is None

    def _lose(self, group: _GroupRun) -> None:
        """Handle a member without retries left: a redundant member replaces it, or the group is voided and replaced."""
        group.lost += 1
        if group.verdict is None and group.lost > self._rollout.extra_members:
            self.gate.remove(group.id)
            self._end(group, "voided", "group")
            self._admit()
            self._wake.set()

    def _report(self, trajectory: Trajectory, ending: Ending, reason: str) -> None:
        self._counters.ended(trajectory, ending, reason)
        self._on_episode(trajectory, ending, reason)


def _as_group(group: _GroupRun) -> Group:
    members = sorted(group.done, key=lambda trajectory: trajectory.member)
    return Group(group.id, group.seed, group.version, members)
