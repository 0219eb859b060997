"""Episodes that an agent of the user plays: its requests are recorded, and the environment scores what it does.

Invariant: if an agent fails before the policy has answered, the episode is voided, like those of failing environments.
Afterwards the policy may be the cause: the episode ends without further reward, so a policy cannot void its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NamedTuple

from agentkit.config import AgentConfig, ModelConfig
from agentkit.errors import AgentUnavailable, EngineError, EnvCrashed, EnvError, EnvTimeout, UnexplainedCrash
from agentkit.sandboxes.tasks import bounded, stopped
from agentkit.tool_calls import Tool
from agentkit.trainers.endpoint.dialogue import Dialogues
from agentkit.trainers.endpoint.recorder import turns
from agentkit.trainers.endpoint.runners import MODEL, Agent, Endpoint, Step, make_runner
from agentkit.trainers.endpoint.server import ChatServer
from agentkit.trainers.endpoint.service import ChatService, Session
from agentkit.trainers.inference.base import TokenGenerator
from agentkit.trainers.rollout.counters import TASK
from agentkit.trainers.rollout.episode import EpisodeRules, system_message, turn_seeds
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.types import Trajectory, Turn


class Effect(NamedTuple):
    """What the environment did with the actions of one step."""

    requests: int
    """The requests before it."""
    actions: tuple[str, ...] = ()
    reward: float = 0.0
    valid: bool = False
    env_s: float = 0.0


class EpisodeTask:
    """The environment of one episode: what the agent sees (``runners.Task``), and what its steps led to."""

    def __init__(self, text: str, instructions: str, rules: EpisodeRules, env: EnvHandle, session: Session) -> None:
        self.text = text
        self.instructions = instructions
        self.tools: tuple[Tool, ...] = rules.source.tools
        self.outcome: tuple[str, str] | None = None
        self.success = False
        self.failure: EnvError | None = None
        self.metrics: dict[str, float] = {}
        self.reset_s = 0.0
        self.effects: list[Effect] = []
        self._env, self._session, self._most = env, session, rules.source.max_turns
        self._one_at_a_time = asyncio.Lock()
        self._ended = False

    def end(self) -> None:
        """Refuse further steps: the environment now belongs to another episode."""
        self._ended = True

    async def step(self, *actions: str) -> Step:
        """Carry out actions of the environment, one after the other.

        Args:
            actions: as the environment's ``step`` takes them.

        Raises:
            RuntimeError: the episode is over.
            TypeError: an action is not a text, or there is none.
            EnvError: the environment failed. The episode is voided, also if the agent catches this error.
        """
        if not actions or not all(isinstance(action, str) for action in actions):
            raise TypeError(f"step takes one or more actions, which are texts, not {actions!r:.200}")
        async with self._one_at_a_time:
            return await self._step(actions)

    async def finish(self, actions: tuple[str, ...]) -> None:
        """Carry out what the agent returned, unless the episode is over; no action is an invalid answer.

        Raises ``EnvError``.
        """
        async with self._one_at_a_time:
            if self.failure is not None:
                raise self.failure
            if self.outcome is None and actions:
                await self._step(actions)
            elif self.outcome is None:
                self.effects.append(Effect(len(self._session.recorder.exchanges)))

    async def _step(self, actions: tuple[str, ...]) -> Step:
        if self.outcome is not None or self.failure is not None or self._ended:
            raise RuntimeError("the episode is over: a step returned done=True, or the agent has ended")
        begun, requests = time.perf_counter(), len(self._session.recorder.exchanges)
        try:
            result = await self._env.act(actions)
        except EnvError as error:
            self.failure = error
            raise
        self.effects.append(Effect(requests, actions, result.reward, result.valid, time.perf_counter() - begun))
        self.success = result.success
        self.metrics |= {f"{TASK}{name}": value for name, value in result.metrics.items()}
        if result.terminated:
            self.outcome = "terminated", ""
        elif result.truncated or len(self.effects) >= self._most:
            self.outcome = "truncated", "env" if result.truncated else "max_turns"
        return Step(result.observation, result.reward, self.outcome is not None)


class AgentPlayer:
    """Plays episodes with an agent, which finds the policy at a recording endpoint on this machine.

    Args:
        agent: which agent.
        model: settings of the chat template.
        engine: the policy.
        renderer: of the policy's tokenizer.
        parser: reads the answer that an agent returns.
        rules: settings of the episodes.

    Raises:
        ConfigError: the agent cannot run.
    """

    def __init__(
        self,
        agent: AgentConfig,
        model: ModelConfig,
        engine: TokenGenerator,
        renderer: ChatRenderer,
        parser: AnswerParser,
        rules: EpisodeRules,
    ) -> None:
        self.rules = rules
        self._agent, self._runner, self._engine, self._parser = agent, make_runner(agent), engine, parser
        self._instructions = system_message(rules.source.instructions, parser)
        self._service = ChatService(engine, Dialogues(renderer.template.tokenizer, model), MODEL, rules.max_context)
        self._server: ChatServer | None = None

    async def close(self) -> None:
        """Stop the endpoint, and what runs the agent. Idempotent."""
        server, self._server = self._server, None
        await self._runner.close()
        if server is not None:
            await server.__aexit__()

    async def play(self, trajectory: Trajectory, env: EnvHandle) -> None:
        """Play one episode in ``env`` and record it in ``trajectory``.

        Raises ``EnvError`` (the episode is void) or ``EngineError``.
        """
        rules, begun = self.rules, time.perf_counter()
        key = (rules.stream, trajectory.group_id, trajectory.member, trajectory.attempt)

        def seed(number: int) -> int:
            return turn_seeds(rules.seed, key, number + 1)[number]

        session = Session(".".join(map(str, key)), rules.temperature, rules.max_tokens, seed)
        try:
            observation = await env.reset(trajectory.seed)
            task = EpisodeTask(observation, self._instructions, rules, env, session)
            task.reset_s = time.perf_counter() - begun
            try:
                problem = await self._act(task, session)
            except EnvError:
                _record_turns(trajectory, task, session, rules.format_penalty)
                raise
            finally:
                task.end()
            _record(trajectory, task, session, problem, rules.format_penalty)
        finally:
            trajectory.duration_s, trajectory.ended_at = time.perf_counter() - begun, time.time()
            trajectory.sandboxes = env.sandboxes
            with contextlib.suppress(EngineError):
                await self._engine.abort(session.name)

    async def _act(self, task: EpisodeTask, session: Session) -> EnvError | None:
        """Let the agent act and answer; return its failure. Raises the errors of environment, host and engine."""
        answer, problem, failure = None, None, None
        server = await self._endpoint()
        try:
            async with self._runner.agent(server.url) as agent:
                with server.recording(session) as key:
                    answer, problem, failure = await _outcome(
                        agent, task, Endpoint(server.url, key), self._agent.timeout
                    )
                    if session.answering and not session.recorder.exchanges:  # then this is the policy's failure
                        await asyncio.wait(session.answering)
        finally:
            await stopped(session.answering)
        if isinstance(failure, UnexplainedCrash) and not session.recorder.exchanges:
            failure = AgentUnavailable(str(failure))  # the policy is not the cause
        for found in (session.failure, task.failure, failure):
            if found is not None:
                raise found
        if problem is None and not (answer is None or isinstance(answer, str)):
            problem = EnvCrashed(f"the agent returned {answer!r:.80}, which is neither a text nor None")
        if not session.recorder.exchanges:
            refused = f"; its request was refused: {session.refusals[-1]}" if session.refusals else ""
            raise problem or EnvCrashed(f"the agent ended without an answer of the policy{refused}")
        if problem is None and isinstance(answer, str):
            await task.finish(self._parser.parse(answer).actions)
        return problem

    async def _endpoint(self) -> ChatServer:
        if self._server is None:
            agent = self._agent
            self._server = ChatServer(
                self._service, host=agent.host, port=0, certificate=agent.certificate, key=agent.key
            )
            await self._server.__aenter__()
        return self._server


class _Outcome(NamedTuple):
    """How an agent ended: with an answer, with a problem of its own, or with a failure of what runs it."""

    answer: object = None
    problem: EnvError | None = None
    failure: EnvError | None = None


async def _outcome(agent: Agent, task: EpisodeTask, endpoint: Endpoint, timeout: float) -> _Outcome:
    """Let an agent act, for at most ``timeout`` seconds."""
    try:
        return await bounded(_ended(agent, task, endpoint), timeout)
    except asyncio.TimeoutError:
        return _Outcome(problem=EnvTimeout(f"the agent took longer than agent.timeout={timeout:g} s"))


async def _ended(agent: Agent, task: EpisodeTask, endpoint: Endpoint) -> _Outcome:
    """Wait until an agent has ended. A caller that cancels this discards the result."""
    try:
        return _Outcome(answer=await agent(task, endpoint))
    except (AgentUnavailable, UnexplainedCrash) as error:
        return _Outcome(failure=error)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _Outcome(problem=EnvCrashed(f"the agent raised {type(error).__name__}: {error}"))


def _record_turns(trajectory: Trajectory, task: EpisodeTask, session: Session, format_penalty: float) -> None:
    """Record the turns of an episode; the reward of a step belongs to the last request before it."""
    trajectory.turns, trajectory.rerendered = turns(session.recorder.exchanges)
    if not trajectory.turns:
        return
    for effect in task.effects:
        turn: Turn = trajectory.turns[max(effect.requests - 1, 0)]
        turn.actions += effect.actions
        turn.reward += effect.reward if effect.valid else effect.reward + format_penalty
        turn.valid = turn.valid and effect.valid
        turn.env_s += effect.env_s
    trajectory.turns[0].env_s += task.reset_s


def _record(
    trajectory: Trajectory, task: EpisodeTask, session: Session, problem: EnvError | None, format_penalty: float
) -> None:
    """Record an episode that the policy has answered."""
    _record_turns(trajectory, task, session, format_penalty)
    trajectory.metrics |= task.metrics
    trajectory.success = task.success
    outcome, trajectory.reason = task.outcome or ("truncated", "agent")
    trajectory.outcome = "terminated" if outcome == "terminated" else "truncated"
    if problem is not None and task.outcome is None:
        trajectory.reason = f"agent: {problem}"
