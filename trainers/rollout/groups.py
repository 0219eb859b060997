"""Groups of episodes: one asyncio task per member, further attempts, redundant members.

Invariant: every episode that starts ends exactly once. It stays in ``done`` of its group, whose owner ends it, or it is
reported here: cancelled as redundant, or voided because its environment failed. A failure of the environment costs a
retry, then the group; an unexplained crash of a sandbox under the policy's code costs one more attempt, then counts as
the policy's failure. Every other error ends the group, and its owner decides what else.

The loop of a run (``loop.py``) and ``agentkit.rollout`` play their episodes here.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from agentkit.config import RunConfig, attempts
from agentkit.errors import EngineError, EnvError, EnvFailureBudgetExceeded, PluginError, UnexplainedCrash
from agentkit.trainers.rollout.counters import RolloutCounters
from agentkit.trainers.rollout.failures import Attempts, FailureBudget, fail, void
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.player import EpisodePlayer
from agentkit.trainers.rollout.plugin import reward_shaping
from agentkit.types import Group, Trajectory

Ending = Literal["trained", "dropped", "cancelled", "voided"]
OnEpisode = Callable[[Trajectory, Ending, str], None]
"""Called once for every started episode: the record, its ending, and the reason."""

SHUTDOWN: tuple[Ending, str] = ("cancelled", "shutdown")
_CLOSE_TIMEOUT = 30.0


@dataclass(slots=True)
class GroupRun:
    """A group that is running or complete."""

    id: int
    seed: int
    version: int
    size: int
    """Members that make the group complete."""
    extra: int = 0
    """Redundant members."""
    done: list[Trajectory] = field(default_factory=list)
    lost: list[Trajectory] = field(default_factory=list)
    """The last attempts of members that ran out of retries."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    verdict: tuple[Ending, str] | None = None
    """Ending of members that are still running, once it is decided."""

    def result(self) -> Group:
        """Return the finished members, and the lost ones of a group that is not complete, by index."""
        members = self.done if len(self.done) == self.size else [*self.done, *self.lost]
        members = sorted(members, key=lambda trajectory: trajectory.member)
        return Group(self.id, self.seed, self.version, members)


class GroupPlayer:
    """Plays groups in one pool of environments, until ``close``.

    Args:
        config: the settings of attempts, failures and the reward.
        player: plays one episode.
        window: number of latest episodes whose failures count for ``rollout.max_failure_share``.
        counters: count failures, retries and endings.
        on_episode: called for each episode that ends here.
        on_complete: called with a group that has enough members; redundant ones have been cancelled.
        on_lost: called with a group that has lost more members than are redundant, to ``end`` it.
        on_error: called with a group and an error other than that of an environment, to ``end`` it.
    """

    def __init__(
        self,
        config: RunConfig,
        player: EpisodePlayer,
        *,
        window: int,
        counters: RolloutCounters,
        on_episode: OnEpisode,
        on_complete: Callable[[GroupRun], None],
        on_lost: Callable[[GroupRun], None],
        on_error: Callable[[GroupRun, BaseException], None],
    ) -> None:
        self.pool = EnvPool(player.rules.source)
        self.alive: set[asyncio.Task[None]] = set()
        """The episodes that are being played."""
        self._player = player
        self._shape = reward_shaping(config.rollout)
        self._attempts = attempts(config)
        self._budget = FailureBudget(config.rollout.max_failure_share, window)
        self._counters = counters
        self._on_episode = on_episode
        self._on_complete, self._on_lost, self._on_error = on_complete, on_lost, on_error

    def play(self, group: GroupRun) -> None:
        """Start all members of a group."""
        for member in range(group.size + group.extra):
            task = asyncio.ensure_future(self._member(group, member))
            group.tasks.append(task)
            self.alive.add(task)
            task.add_done_callback(functools.partial(self._task_ended, group))

    def end(self, group: GroupRun, ending: Ending, reason: str) -> None:
        """Discard a group and all of its members."""
        self._cancel(group, (ending, reason))
        for trajectory in group.done:
            self._report(trajectory, ending, reason)

    async def close(self) -> None:
        """Wait, in bounded time, for the episodes of groups that were ended, and close all environments. Idempotent."""
        if self.alive:  # an engine that ignores its cancellation must not delay the exit
            await asyncio.wait(self.alive, timeout=_CLOSE_TIMEOUT)
        await self._player.close()
        await self.pool.close()

    def _task_ended(self, group: GroupRun, task: asyncio.Task[None]) -> None:
        self.alive.discard(task)
        if not task.cancelled():
            error = task.exception()
        elif group.verdict is None:
            error = EngineError(f"an episode of {self.pool.source.id} was cancelled by its engine")
        else:
            return
        if error is not None:
            self._on_error(group, error)

    def _cancel(self, group: GroupRun, verdict: tuple[Ending, str]) -> None:
        group.verdict = verdict
        current = asyncio.current_task()
        for task in group.tasks:
            if task is not current and not task.done():
                task.cancel()
        group.tasks.clear()

    async def _member(self, group: GroupRun, member: int) -> None:
        """Play one member; retry in a fresh environment if the environment fails."""
        source = self.pool.source
        attempts = Attempts(self._attempts)
        for attempt in itertools.count():
            trajectory = Trajectory(group.id, member, source.id, group.seed, group.version, attempt=attempt)
            env = self.pool.acquire(fresh=attempt > 0)
            try:
                await self._player.play(trajectory, env)
            except EnvError as error:
                self.pool.release(env, failed=True)
                if attempts.blame(error, trajectory):
                    self._counters.policy_crashes += 1
                    self._finish(group, trajectory, crash=error)
                    return
                again = attempts.again(error)
                self._void(group, trajectory, error, retried=again)
                if group.verdict is not None:
                    return
                if not again:
                    self._lose(group, trajectory)
                    return
            except BaseException:
                self.pool.release(env)
                trajectory.outcome, trajectory.reason = "truncated", "interrupted"
                self._report(trajectory, *(group.verdict or SHUTDOWN))
                raise
            else:
                self.pool.release(env)
                self._finish(group, trajectory)
                return

    def _finish(self, group: GroupRun, trajectory: Trajectory, *, crash: EnvError | None = None) -> None:
        """Handle an episode with a result; ``crash``: the failure of which the policy is guilty."""
        self._budget.record(None, running=len(self.alive))
        try:
            self._shape(trajectory)
        except PluginError:
            self._report(trajectory, *SHUTDOWN)
            raise
        if crash is not None:
            fail(trajectory, crash)
        if group.verdict is not None:
            self._report(trajectory, *group.verdict)
            return
        group.done.append(trajectory)
        if len(group.done) == group.size:
            self._cancel(group, ("cancelled", "redundant_member"))
            self._on_complete(group)

    def _void(self, group: GroupRun, trajectory: Trajectory, error: EnvError, *, retried: bool) -> None:
        void(trajectory, error)
        self._counters.failures += 1
        self._report(trajectory, "voided", type(error).__name__)
        if isinstance(error, EnvFailureBudgetExceeded):
            raise error
        if not isinstance(error, UnexplainedCrash):
            self._budget.record(error, running=len(self.alive))
        self._counters.retries += retried and group.verdict is None

    def _lose(self, group: GroupRun, trajectory: Trajectory) -> None:
        """Handle a member without retries left: a redundant member replaces it, or the group is lost."""
        group.lost.append(trajectory)
        if group.verdict is None and len(group.lost) > group.extra:
            self._on_lost(group)

    def _report(self, trajectory: Trajectory, ending: Ending, reason: str) -> None:
        self._counters.ended(trajectory, ending, reason)
        self._on_episode(trajectory, ending, reason)
