"""Behaviour cloning: expert episodes become token records like those of rollouts, and the learner fits them.

Invariant: an expert's turn is tokenised by the renderer and parser of the rollout loop, so the policy learns exactly
the format that is used later.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.envs.base import AsyncTextEnv, expert_actions
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import AgentkitError, ConfigError, EnvError
from agentkit.store import Recorder
from agentkit.trainers.batch import flatten
from agentkit.trainers.learner.schedule import schedule_factor
from agentkit.trainers.roles import Roles
from agentkit.trainers.rollout.contract import check_reset, check_step, crashed
from agentkit.trainers.rollout.episode import system_message
from agentkit.trainers.rollout.evaluation import evaluate
from agentkit.trainers.rollout.failures import Attempts, FailureBudget
from agentkit.trainers.rollout.hosts import EnvSource
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.types import Group, Trajectory, Turn

WARMUP_UPDATES = 10
"""Updates of linear warm-up; the first gradients of a fresh model are noise."""


class Messages(Protocol):
    """Receiver of the progress of imitation."""

    def message(self, text: str) -> None: ...


async def imitate(config: RunConfig, roles: Roles, recorder: Recorder, view: Messages, stop: asyncio.Event) -> float:
    """Fit ``config.imitation.episodes`` expert episodes; on return the engine serves the resulting weights.

    Returns the success rate of these episodes. Ends early when ``stop`` is set, or when the policy's success on other
    training tasks reaches ``stop_success`` times that. Raises ``ConfigError`` if there is no expert, and
    ``EnvError`` as ``expert_episodes``.
    """
    settings = config.imitation
    assert settings is not None
    episodes, failures = await asyncio.to_thread(expert_episodes, config, roles.renderer, roles.parser)
    if failures:
        view.message(
            f"imitation: {len(failures)} of {settings.episodes} episodes of the expert are left out, because the "
            f"environment failed in every attempt; the last failure: {type(failures[-1]).__name__}: {failures[-1]}"
        )
    demonstrated_success = float(np.mean([episode.success for episode in episodes]))
    noise = f" with {settings.noise:.0%} random actions" if settings.noise else ""
    view.message(
        f"imitation: {len(episodes)} episodes of the expert{noise}, which succeeds in {demonstrated_success:.1%}"
    )
    order = np.random.default_rng(config.seed)
    planned = settings.epochs * math.ceil(len(episodes) / settings.batch_episodes)
    success = None
    with progress.work("imitation", planned, unit="updates") as work:
        for _ in range(settings.epochs):
            shuffled = [episodes[index] for index in order.permutation(len(episodes))]
            for start in range(0, len(shuffled), settings.batch_episodes):
                batch = flatten([_alone(episode) for episode in shuffled[start : start + settings.batch_episodes]])
                rate = settings.lr * schedule_factor(work.done, settings.schedule, WARMUP_UPDATES, planned)
                metrics = await roles.learner.imitate(batch, rate)
                work.advance()
                updates = work.done
                if updates % settings.check_every == 0 and settings.stop_success is not None:
                    success = await _check(config, roles)
                    view.message(f"imitation: {updates} updates, success {success:.1%} on training tasks")
                    metrics["imitation/success"] = success
                recorder.metrics(0, {"imitation/updates": updates, **metrics})
                enough = success is not None and success >= (settings.stop_success or 1.0) * demonstrated_success
                if enough or stop.is_set():
                    if not enough and updates < planned:
                        view.message(
                            f"imitation: stopped after {updates} of {planned} updates; a resumed run trains on from "
                            "here"
                        )
                    await roles.publish(0)
                    return demonstrated_success
    await roles.publish(0)
    return demonstrated_success


def expert_episodes(
    config: RunConfig, renderer: ChatRenderer, parser: AnswerParser
) -> tuple[list[Trajectory], list[EnvError]]:
    """Play the expert on the first ``imitation.episodes`` training tasks, one action per turn.

    With probability ``imitation.noise``, an action is drawn at random from those that the environment lists; it is
    executed and demonstrated like any other.

    Episodes are truncated at the environment's turns or ``engine.max_context`` tokens, as in rollouts. Their
    log-probabilities are zero; imitation does not use them. An episode whose environment fails is repeated in a fresh
    one, at most ``rollout.retries`` times, and then left out.

    Returns:
        The episodes, and one error for each that was left out.

    Raises:
        ConfigError: the environment has no expert, or, with noise, lists no actions.
        EnvFailureBudgetExceeded: as in rollouts, so many episodes failed that the others would be a biased sample.
        EnvError: all episodes failed.
    """
    settings = config.imitation
    assert settings is not None
    source = EnvSource.of(config.env)
    if not source.has_expert:
        raise ConfigError(
            f"imitation needs an expert, but {source.id} has none: give its class an `expert()` method that yields "
            "solving actions, or drop the imitation section"
        )
    demonstrate = _Demonstrator(source, renderer, parser, settings.noise, config.engine.max_context)
    budget = FailureBudget(config.rollout.max_failure_share, settings.episodes)
    cycle = config.env.num_tasks or settings.episodes
    episodes: list[Trajectory] = []
    failures: list[EnvError] = []
    try:
        with progress.work("episodes of the expert", settings.episodes) as work:
            for k in range(settings.episodes):
                result = demonstrate.attempt(config.env.first_seed + k % cycle, Attempts(1 + config.rollout.retries))
                if isinstance(result, EnvError):
                    failures.append(result)
                    budget.record(result, running=0)
                else:
                    episodes.append(result)
                    budget.record(None, running=0)
                work.advance()
    finally:
        demonstrate.close()
    if not episodes:
        raise failures[-1]
    return episodes, failures


@contextlib.contextmanager
def _calling(call: str) -> Iterator[None]:
    """Raise ``EnvCrashed`` for an exception of the environment's code."""
    try:
        yield
    except AgentkitError:
        raise
    except (Exception, SystemExit) as error:
        raise crashed(call, error) from error


class _Demonstrator:
    """Plays an environment's expert and records the answers that a policy would give."""

    def __init__(
        self, source: EnvSource, renderer: ChatRenderer, parser: AnswerParser, noise: float, max_context: int
    ) -> None:
        self.source, self.renderer, self.parser = source, renderer, parser
        self.noise, self.max_context = noise, max_context
        self.system = system_message(source.instructions, parser)
        self.env: Any = None

    def attempt(self, seed: int, attempts: Attempts) -> Trajectory | EnvError:
        """Return an episode, or the error of the last attempt if the environment failed in all of them."""
        while True:
            try:
                return self(seed)
            except EnvError as error:
                with contextlib.suppress(Exception):  # it has failed already
                    self.close()
                if not attempts.again(error):
                    return error

    def close(self) -> None:
        """Close the environment; the next episode makes another one."""
        env, self.env = self.env, None
        if env is not None:
            env.close()

    def __call__(self, seed: int) -> Trajectory:
        """Return an episode. Raises ``EnvError`` if the environment fails."""
        if self.env is None:
            made = self.source.make()
            self.env = SyncTextEnv(made) if isinstance(made, AsyncTextEnv) else made
        with _calling("reset"):
            result = self.env.reset(seed=seed)
        observation, info = check_reset(result), result[1]
        trajectory = Trajectory(group_id=seed, member=0, env_id=self.source.id, seed=seed, version_started=0)
        trajectory.rerendered = self.renderer.rerenders
        prompt_ids, tokens = self.renderer.prompt(self.system, (), observation), 0
        rng = np.random.default_rng(seed)
        plan = expert_actions(self.env)
        while (action := self._next(plan)) is not None:
            if self.noise and rng.random() < self.noise:
                action = str(rng.choice(self._listed(info)))
                plan = expert_actions(self.env)  # the plan assumed the action that was not taken
            answer = self.parser.format([action])
            action_ids = self.renderer.encode_answer(answer)
            tokens = (0 if self.renderer.rerenders else tokens) + len(prompt_ids) + len(action_ids)
            if tokens > self.max_context or len(trajectory.turns) == self.source.max_turns:
                break
            turn = Turn(
                prompt_ids=prompt_ids,
                action_ids=action_ids,
                action_logprobs=np.zeros(len(action_ids), np.float32),
                versions=((0, len(action_ids)),),
                observation=observation,
                response=answer,
                actions=(action,),
            )
            with _calling("step"):
                result = self.env.step(action)
            observation, turn.reward, terminated, truncated, success, *_ = check_step(result)
            info, trajectory.success = result[4], success
            trajectory.turns.append(turn)
            if terminated or truncated:
                break
            prompt_ids = self.renderer.prompt(self.system, trajectory.turns, observation)
        return trajectory

    def _next(self, plan: Iterator[str]) -> str | None:
        with _calling("expert"):
            return next(plan, None)

    def _listed(self, info: dict[str, Any]) -> list[str]:
        if not info.get("admissible_actions"):
            raise ConfigError(
                f"imitation.noise={self.noise} draws random actions, but {self.source.id} lists none: put them into "
                "info['admissible_actions'], or set imitation.noise=0"
            )
        return info["admissible_actions"]


def _alone(episode: Trajectory) -> Group:
    return Group(episode.group_id, episode.seed, 0, [episode])


async def _check(config: RunConfig, roles: Roles) -> float:
    """Return the success rate of the current weights on training tasks that are not imitated."""
    settings = config.imitation
    assert settings is not None
    await roles.publish(0)
    first = config.env.first_seed + settings.episodes
    seeds = range(first, first + settings.check_episodes)
    temperature = config.rollout.temperature
    result = await evaluate(config, roles.engine, roles.renderer, roles.parser, seeds, temperature=temperature)
    return result.success
