"""One episode: observations, answers and actions, recorded token by token.

Invariant: the engine is always given exactly the concatenation of what was recorded before (``prompt_ids`` and
``action_ids``, turn after turn, then this turn's prompt), or this turn's prompt alone if the history is rendered again.
So the record is what the engine saw and produced.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agentkit.config import RunConfig
from agentkit.errors import ConfigError, EngineError
from agentkit.trainers.inference.base import Generation, Sampling, TokenGenerator
from agentkit.trainers.rollout.counters import TASK
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.source import EnvSource
from agentkit.trainers.rollout.summary import Summarize, make_summary
from agentkit.types import IntArray, Trajectory, Turn

_NOTHING: IntArray = np.empty(0, np.int32)
_MAX_ABORTS = 100
"""Regenerations of one turn before the engine counts as broken."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """Settings that all episodes of a run share."""

    source: EnvSource
    max_tokens: int
    """Maximum tokens of one answer."""
    max_context: int
    """Maximum tokens of a sequence in the engine."""
    temperature: float
    format_penalty: float
    seed: int
    """The run's seed; the sampling seeds of all requests follow from it."""
    shown_turns: int | None = None
    """Earlier turns that a chat endpoint is shown; None: all. (A renderer has its own.)"""
    summarize: Summarize | None = None
    """What a chat endpoint is shown of the other turns."""
    stream: int = 0
    """Use of the episodes (training 0, evaluation 1); uses share neither sessions nor random numbers."""

    @classmethod
    def of(cls, config: RunConfig, source: EnvSource) -> EpisodeRules:
        """Return the rules of a run's training episodes."""
        return cls(
            source=source,
            max_tokens=config.rollout.max_tokens,
            max_context=config.engine.max_context,
            temperature=config.rollout.temperature,
            format_penalty=config.env.format_penalty,
            seed=config.seed,
            shown_turns=config.model.shown_turns,
            summarize=make_summary(config.model),
        )


def system_message(instructions: str, parser: AnswerParser) -> str:
    """The system message of every episode: the rules of the environment and the answer format."""
    return f"{instructions.strip()}\n\n{parser.instructions}" if instructions.strip() else parser.instructions


def invalid_answer_message(observation: str, parser: AnswerParser, problem: str = "") -> str:
    """The message after an answer with an invalid format (``ParsedAnswer.problem``); the environment has not been
    stepped."""
    return f"{problem or f'Your answer had no valid format. {parser.instructions}'}\n{observation}"


class Acted(NamedTuple):
    """Result of an answer."""

    observation: str
    """The environment's last observation."""
    shown: str
    """Next message to the model: the observation, or the error in its answer."""
    terminated: bool
    truncated: bool


async def act(
    env: EnvHandle, trajectory: Trajectory, turn: Turn, observation: str, parser: AnswerParser, format_penalty: float
) -> Acted:
    """Carry out the answer of ``turn``; record its reward, validity and time, and the success.

    ``observation`` is the last observation; it stays valid if the answer names no action. Raises ``EnvError``.
    """
    terminated = truncated = False
    if turn.actions:
        start = time.perf_counter()
        result = await env.act(turn.actions)
        turn.env_s += time.perf_counter() - start
        observation, turn.reward, terminated, truncated, trajectory.success, turn.valid, metrics = result
        trajectory.metrics.update({f"{TASK}{name}": value for name, value in metrics.items()})
        shown = observation
    else:
        shown = invalid_answer_message(observation, parser, parser.parse(turn.response).problem)
    if not turn.valid:
        turn.reward += format_penalty
    return Acted(observation, shown, terminated, truncated)


class TokenBuffer:
    """A growing int32 sequence. Earlier views stay unchanged."""

    __slots__ = ("_data", "size")

    def __init__(self) -> None:
        self._data = np.empty(256, np.int32)
        self.size = 0

    def extend(self, ids: IntArray) -> None:
        size = self.size + len(ids)
        if size > len(self._data):
            grown = np.empty(max(size, 2 * len(self._data)), np.int32)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : size] = ids
        self.size = size

    def view(self) -> IntArray:
        return self._data[: self.size]


def turn_seeds(run_seed: int, key: tuple[int, ...], turns: int) -> list[int]:
    """Return one 63-bit sampling seed per turn. It depends on the request, not on the order of requests.

    ``key`` names the episode. With more turns, the first seeds stay the same.
    """
    sequence = np.random.SeedSequence(run_seed, spawn_key=key)
    return (sequence.generate_state(turns, np.uint64) >> np.uint64(1)).tolist()


class Player:
    """Plays episodes; keeps no state between episodes."""

    def __init__(
        self, engine: TokenGenerator, renderer: ChatRenderer, parser: AnswerParser, rules: EpisodeRules
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.parser = parser
        self.rules = rules
        self._system = system_message(rules.source.instructions, parser)

    async def play(self, trajectory: Trajectory, env: EnvHandle) -> None:
        """Play one episode in ``env`` and record it in ``trajectory``.

        Raises ``EnvError`` (the episode is void; its turns stay recorded), ``EngineError``, or
        ``ConfigError`` if not even the first prompt fits into the context.
        """
        rules, tokens, begun = self.rules, TokenBuffer(), time.perf_counter()
        trajectory.system, trajectory.rerendered = self._system, self.renderer.rerenders
        key = (rules.stream, trajectory.group_id, trajectory.member, trajectory.attempt)
        session = ".".join(map(str, key))
        seeds: list[int] = []
        try:
            observation = await env.reset(trajectory.seed)
            waited = time.perf_counter() - begun
            prompt = self.renderer.prompt(self._system, (), observation)
            shown = observation
            while True:
                number = len(trajectory.turns)
                room = rules.max_context - tokens.size - len(prompt)
                if room < rules.max_tokens and (number or room < 1):
                    self._outgrown(trajectory, prompt)
                    return
                if number == len(seeds):
                    seeds = turn_seeds(rules.seed, key, 2 * number or min(rules.source.max_turns, 64))
                tokens.extend(prompt)
                turn = await self._answer(trajectory, tokens, min(rules.max_tokens, room), seeds[number], session)
                turn.prompt_ids, turn.observation, turn.env_s = prompt, shown, waited
                trajectory.turns.append(turn)
                waited = 0.0
                step = await act(env, trajectory, turn, observation, self.parser, rules.format_penalty)
                observation, shown = step.observation, step.shown
                if step.terminated:
                    trajectory.outcome = "terminated"
                    return
                prompt = self.renderer.prompt(self._system, trajectory.turns, shown)
                if self.renderer.rerenders:
                    tokens = TokenBuffer()
                if step.truncated or number + 1 >= rules.source.max_turns:
                    room = rules.max_context - tokens.size - len(prompt)
                    _truncate(trajectory, "env" if step.truncated else "max_turns", prompt, room)
                    return
        finally:
            trajectory.duration_s, trajectory.ended_at = time.perf_counter() - begun, time.time()
            trajectory.sandboxes = env.sandboxes
            with contextlib.suppress(EngineError):
                await self.engine.abort(session)

    async def close(self) -> None:
        """Do nothing: no episode left anything open."""

    async def _answer(
        self, trajectory: Trajectory, tokens: TokenBuffer, max_tokens: int, seed: int, session: str
    ) -> Turn:
        """Generate one answer to ``tokens`` and append it; the caller fills in prompt and outcome."""
        sampling = Sampling(max_tokens, temperature=self.rules.temperature, stop_ids=self.renderer.stop_ids, seed=seed)
        start = time.perf_counter()
        generation = await self._generate(trajectory, tokens.view(), sampling, session)
        elapsed = time.perf_counter() - start
        tokens.extend(generation.ids)
        response = self.renderer.decode(generation.ids)
        answer = self.parser.parse(response)
        return Turn(
            prompt_ids=_NOTHING,
            action_ids=generation.ids,
            action_logprobs=generation.logprobs,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            response=response,
            actions=answer.actions,
            valid=answer.valid,
            generate_s=elapsed,
        )

    async def _generate(
        self, trajectory: Trajectory, prompt_ids: IntArray, sampling: Sampling, session: str
    ) -> Generation:
        """Generate an answer; repeat as long as weight updates interrupt it."""
        for _ in range(_MAX_ABORTS):
            generation = await self.engine.generate(prompt_ids, sampling, session=session)
            if generation.finish_reason != "abort":
                if not len(generation.ids):
                    raise EngineError(f"the engine gave an empty answer (finish_reason={generation.finish_reason!r})")
                return generation
            trajectory.metrics["aborted_turns"] = trajectory.metrics.get("aborted_turns", 0.0) + 1
        raise EngineError(f"the engine aborted one turn {_MAX_ABORTS} times and does not resume")

    def _outgrown(self, trajectory: Trajectory, prompt: IntArray) -> None:
        """End before ``prompt``, which leaves no room for an answer; a critic has no state to bootstrap on."""
        if not trajectory.turns:
            raise ConfigError(
                f"the first prompt of {trajectory.env_id} (seed {trajectory.seed}) has {len(prompt)} tokens, which "
                f"leaves no room for an answer in engine.max_context={self.rules.max_context}: raise it"
            )
        trajectory.outcome, trajectory.reason = "truncated", "context"


def _truncate(trajectory: Trajectory, reason: str, prompt: IntArray, room: int) -> None:
    """End at ``prompt``, an observation without an answer; a critic bootstraps there if it fits (``room >= 0``)."""
    trajectory.outcome = "truncated"
    trajectory.reason = reason
    if room >= 0:
        trajectory.final_ids = prompt
