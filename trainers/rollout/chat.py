"""Episodes with a chat endpoint: messages instead of tokens, for evaluation only.

Invariant: the environment's part of an episode (effect and cost of an answer, end) is the same as in training. The
record holds texts without ids and log-probs, and cannot be trained on.
"""

from __future__ import annotations

import time

import numpy as np

from agentkit.errors import ConfigError
from agentkit.openai import ChatEndpoint, ContextExceeded
from agentkit.tool_calls import wrap_hermes
from agentkit.trainers.rollout.episode import EpisodeRules, act, system_message, turn_seeds
from agentkit.trainers.rollout.history import conversation
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.tools import for_endpoint
from agentkit.types import Message, Trajectory, Turn

_MAX_SEED = 2**31
"""Servers differ in the accepted size of a seed."""


class ChatPlayer:
    """Plays episodes with an endpoint; keeps no state between episodes."""

    def __init__(self, endpoint: ChatEndpoint, parser: AnswerParser, rules: EpisodeRules) -> None:
        self.endpoint = endpoint
        self.parser = parser
        self.rules = rules
        self._tools = for_endpoint(rules.source.tools)
        self._system = system_message(rules.source.instructions, parser)

    async def play(self, trajectory: Trajectory, env: EnvHandle) -> None:
        """Play one episode in ``env`` and record it in ``trajectory``.

        Raises ``EnvError`` (the episode is void), ``EngineError``, or ``ConfigError`` if not even the first
        observation fits into the endpoint's context.
        """
        rules, begun = self.rules, time.perf_counter()
        trajectory.system = self._system
        key = (rules.stream, trajectory.group_id, trajectory.member, trajectory.attempt)
        seeds = turn_seeds(rules.seed, key, rules.source.max_turns)
        try:
            shown = observation = await env.reset(trajectory.seed)
            waited = time.perf_counter() - begun
            for number in range(rules.source.max_turns):
                messages = conversation(
                    self._system, trajectory.turns, shown, rules.shown_turns, rules.summarize, self._tools
                )
                try:
                    turn = await self._answer(trajectory, messages, seeds[number] % _MAX_SEED)
                except ContextExceeded as error:
                    if not trajectory.turns:
                        raise ConfigError(
                            f"the first prompt of {trajectory.env_id} does not fit, with rollout.max_tokens="
                            f"{rules.max_tokens} for the answer ({error}): serve the model with a longer context"
                        ) from error
                    trajectory.outcome, trajectory.reason = "truncated", "context"
                    return
                turn.observation, turn.env_s = shown, waited
                trajectory.turns.append(turn)
                waited = 0.0
                step = await act(env, trajectory, turn, observation, self.parser, rules.format_penalty)
                observation, shown = step.observation, step.shown
                if step.terminated:
                    trajectory.outcome = "terminated"
                    return
                if step.truncated:
                    trajectory.outcome, trajectory.reason = "truncated", "env"
                    return
            trajectory.outcome, trajectory.reason = "truncated", "max_turns"
        finally:
            trajectory.duration_s, trajectory.ended_at = time.perf_counter() - begun, time.time()
            trajectory.sandboxes = env.sandboxes

    async def close(self) -> None:
        """Do nothing: the endpoint belongs to the caller."""

    async def _answer(self, trajectory: Trajectory, messages: list[Message], seed: int) -> Turn:
        start = time.perf_counter()
        reply = await self.endpoint.chat(
            messages,
            max_tokens=self.rules.max_tokens,
            temperature=self.rules.temperature,
            seed=seed,
            tools=self.rules.source.tools,
        )
        text = "\n".join([*filter(None, [reply.text]), *(wrap_hermes(*call) for call in reply.calls)])
        for name, count in (("prompt_tokens", reply.prompt_tokens), ("completion_tokens", reply.completion_tokens)):
            trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + count
        answer = self.parser.parse(text)
        return Turn(
            prompt_ids=np.empty(0, np.int32),
            action_ids=np.empty(0, np.int32),
            action_logprobs=np.empty(0, np.float32),
            versions=(),
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            response=text,
            actions=answer.actions,
            valid=answer.valid,
            generate_s=time.perf_counter() - start,
        )
