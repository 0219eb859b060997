"""Evaluation of a policy on episodes outside training.

Invariant: success rate and means cover episodes whose environment worked; the others are counted separately. Every
episode that ends is reported once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agentkit import progress
from agentkit.config import RunConfig, attempts
from agentkit.errors import EnvError, EnvFailureBudgetExceeded, UnexplainedCrash
from agentkit.openai import ChatEndpoint
from agentkit.results import EvalResult
from agentkit.trainers.inference.base import InferenceEngine
from agentkit.trainers.rollout.chat import ChatPlayer
from agentkit.trainers.rollout.counters import task_metrics
from agentkit.trainers.rollout.episode import EpisodeRules
from agentkit.trainers.rollout.failures import Attempts, fail, void
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.player import EpisodePlayer, make_player
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import Trajectory

_EVALUATION_STREAM = 1

OnEpisode = Callable[[Trajectory, str], None]
"""Called for every episode that ends, with the kind of the error if its environment failed. ``group_id`` is the index
of its seed; another attempt may follow a failure."""


async def evaluate(
    config: RunConfig,
    engine: InferenceEngine,
    renderer: ChatRenderer,
    parser: AnswerParser,
    seeds: Sequence[int],
    *,
    temperature: float,
    concurrency: int | None = None,
    on_episode: OnEpisode = lambda trajectory, reason: None,
) -> EvalResult:
    """Play one episode of ``config.env`` for each of ``seeds``; ``temperature`` 0 is greedy.

    At most ``concurrency`` episodes run at a time; by default twice the batches of all engines, so they never
    wait for environments. Failed environments are retried as in training.

    Raises ``EnvFailureBudgetExceeded`` if no episode has a result, and the errors of the engine.
    """
    player = make_player(config, engine, renderer, parser, _rules(config, temperature))
    concurrency = concurrency or 2 * config.engine.replicas * config.engine.max_batch
    return await _play_all(player, seeds, concurrency, attempts(config), on_episode)


async def evaluate_endpoint(
    config: RunConfig,
    endpoint: ChatEndpoint,
    parser: AnswerParser,
    seeds: Sequence[int],
    *,
    temperature: float,
    concurrency: int | None = None,
    on_episode: OnEpisode = lambda trajectory, reason: None,
) -> EvalResult:
    """``evaluate`` for a model behind a chat endpoint, at most ``engine.max_batch`` episodes at a time by default."""
    player = ChatPlayer(endpoint, parser, _rules(config, temperature))
    return await _play_all(player, seeds, concurrency or config.engine.max_batch, attempts(config), on_episode)


def _rules(config: RunConfig, temperature: float) -> EpisodeRules:
    rules = EpisodeRules.of(config, EnvSource.of(config.env))
    return replace(rules, temperature=temperature, stream=_EVALUATION_STREAM)


async def _play_all(
    player: EpisodePlayer, seeds: Sequence[int], concurrency: int, attempts: int, on_episode: OnEpisode
) -> EvalResult:
    pool = EnvPool(player.rules.source)
    queue = list(enumerate(seeds))[::-1]
    played: dict[int, Trajectory] = {}
    voided: Counter[str] = Counter()

    def so_far() -> str:
        valid = [trajectory.success for trajectory in tuple(played.values()) if trajectory.outcome != "voided"]
        return f"success {sum(valid) / len(valid):.0%}" if valid else ""

    with progress.work("evaluation", len(queue), detail=so_far) as work:

        async def worker() -> None:
            while queue:
                index, task_seed = queue.pop()
                played[index] = await _one(player, pool, index, task_seed, attempts, on_episode, voided)
                work.advance()

        workers = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, len(queue)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await player.close()
            await pool.close()
    return _result([played[index] for index in range(len(seeds))], voided)


async def _one(
    player: EpisodePlayer,
    pool: EnvPool,
    index: int,
    seed: int,
    most: int,
    on_episode: OnEpisode,
    voided: Counter[str],
) -> Trajectory:
    attempts = Attempts(most)
    for attempt in itertools.count():
        trajectory = Trajectory(index, 0, player.rules.source.id, seed, version_started=0, attempt=attempt)
        env = pool.acquire(fresh=attempt > 0)
        try:
            await player.play(trajectory, env)
        except EnvError as error:
            pool.release(env, failed=True)
            if attempts.blame(error, trajectory):
                fail(trajectory, error)
                on_episode(trajectory, "")
                return trajectory
            void(trajectory, error)
            voided[type(error).__name__] += 1
            on_episode(trajectory, type(error).__name__)
            if not attempts.again(error):
                return trajectory
        except BaseException:
            pool.release(env)
            raise
        else:
            pool.release(env)
            if versions := trajectory.turns[0].versions:  # unknown for an endpoint
                trajectory.version_started = versions[0][0]
            on_episode(trajectory, "")
            return trajectory
    raise AssertionError("unreachable")


def _result(trajectories: Sequence[Trajectory], voided: Mapping[str, int]) -> EvalResult:
    valid = [trajectory for trajectory in trajectories if trajectory.outcome != "voided"]
    if not valid:
        reason = trajectories[-1].reason if trajectories else "no seeds were given"
        raise EnvFailureBudgetExceeded(f"none of {len(trajectories)} evaluation episodes has a result: {reason}")
    count = len(valid)
    return EvalResult(
        success=sum(trajectory.success for trajectory in valid) / count,
        return_mean=sum(trajectory.reward for trajectory in valid) / count,
        turns_mean=sum(len(trajectory.turns) for trajectory in valid) / count,
        episodes=count,
        failures=len(trajectories) - count,
        policy_crashes=sum(trajectory.reason.startswith(UnexplainedCrash.__name__) for trajectory in valid),
        voided=dict(voided),
        trajectories=tuple(trajectories),
        metrics=task_metrics(valid),
    )


def evaluation_metrics(result: EvalResult) -> dict[str, float]:
    """Return the metrics of an evaluation (``eval/…``)."""
    return {
        "eval/success": result.success,
        "eval/return_mean": result.return_mean,
        "eval/turns_mean": result.turns_mean,
        **{f"eval/{name}": value for name, value in result.metrics.items()},
    }
