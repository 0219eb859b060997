"""Episodes that an agent of the user plays: its requests are recorded, and the environment scores what it does.

Invariant: if an agent fails before the policy has answered, the episode is voided, like those of failing environments.
Afterwards the policy may be the cause: the episode ends without further reward, so a policy cannot void its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from agentkit import entry_points
from agentkit.config import AgentConfig, ModelConfig
from agentkit.errors import ConfigError, EngineError, EnvCrashed, EnvError, EnvTimeout
from agentkit.sandboxes.tasks import finished
from agentkit.tool_calls import Tool
from agentkit.trainers.endpoint.dialogue import Dialogues
from agentkit.trainers.endpoint.recorder import turns
from agentkit.trainers.endpoint.server import ChatServer
from agentkit.trainers.endpoint.service import ChatService, Session
from agentkit.trainers.inference.base import TokenGenerator
from agentkit.trainers.rollout.counters import TASK
from agentkit.trainers.rollout.episode import EpisodeRules, system_message, turn_seeds
from agentkit.trainers.rollout.hosts import EnvHandle
from agentkit.trainers.rollout.parser import AnswerParser
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.types import Trajectory, Turn

MODEL = "policy"
"""The model's name in an agent's requests."""
_LONGEST_ANSWER = 1 << 20
"""Bytes that are read of a command's output."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds the policy: settings of any client of OpenAI's API."""

    url: str
    """The base URL."""
    key: str
    """The API key; it names the episode."""
    model: str = MODEL


class Step(NamedTuple):
    """What an action led to."""

    observation: str
    reward: float
    done: bool
    """The episode is over."""


class Task:
    """The environment of one episode, as an agent sees it."""

    def __init__(self, text: str, instructions: str, rules: EpisodeRules, env: EnvHandle, session: Session) -> None:
        self.text = text
        """The first observation, which states the task."""
        self.instructions = instructions
        """The rules of the environment, and the format of answers that the agent returns."""
        self.tools: tuple[Tool, ...] = rules.source.tools
        """Tools of the environment, in the form of requests. A call is the action ``{"name": …, "arguments": …}``."""
        self.outcome: tuple[str, str] | None = None
        self.success = False
        self.failure: EnvError | None = None
        self.metrics: dict[str, float] = {}
        self.env_s = 0.0
        self.effects: list[tuple[int, tuple[str, ...], float, bool]] = []
        """For each step: the requests before it, the actions, the reward, and whether they were valid."""
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
            EnvError: the environment failed; the episode is voided, whatever the agent does.
        """
        if not actions or not all(isinstance(action, str) for action in actions):
            raise TypeError(f"step takes one or more actions, which are texts, not {actions!r:.200}")
        async with self._one_at_a_time:
            return await self._step(actions)

    async def _step(self, actions: tuple[str, ...]) -> Step:
        if self.outcome is not None or self.failure is not None or self._ended:
            raise RuntimeError("the episode is over: a step returned done=True, or the agent has ended")
        begun = time.perf_counter()
        try:
            result = await self._env.act(actions)
        except EnvError as error:
            self.failure = error
            raise
        self.env_s += time.perf_counter() - begun
        self.effects.append((len(self._session.recorder.exchanges), actions, result.reward, result.valid))
        self.success = result.success
        self.metrics |= {f"{TASK}{name}": value for name, value in result.metrics.items()}
        if result.terminated:
            self.outcome = "terminated", ""
        elif result.truncated or len(self.effects) >= self._most:
            self.outcome = "truncated", "env" if result.truncated else "max_turns"
        return Step(result.observation, result.reward, self.outcome is not None)


Agent = Callable[[Task, Endpoint], Awaitable["str | None"]]
"""Plays one episode, and returns its answer; None if its steps say all."""


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
        ConfigError: the agent cannot be loaded.
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
        self._agent, self._timeout, self._engine, self._parser = load_agent(agent), agent.timeout, engine, parser
        self._instructions = system_message(rules.source.instructions, parser)
        self._service = ChatService(engine, Dialogues(renderer.template.tokenizer, model), MODEL, rules.max_context)
        self._server: ChatServer | None = None

    async def close(self) -> None:
        """Stop the endpoint. Idempotent."""
        server, self._server = self._server, None
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
            task = Task(observation, self._instructions, rules, env, session)
            task.env_s = time.perf_counter() - begun
            try:
                problem = await self._act(task, session)
            except EnvError:
                trajectory.turns, trajectory.rerendered = turns(session.recorder.exchanges)
                raise
            finally:
                task.end()
            _record(trajectory, task, session, problem, rules.format_penalty)
        finally:
            trajectory.duration_s = time.perf_counter() - begun
            with contextlib.suppress(EngineError):
                await self._engine.abort(session.name)

    async def _act(self, task: Task, session: Session) -> EnvError | None:
        """Let the agent act and answer; return its failure. Raises the errors of environment and engine."""
        problem: EnvError | None = None
        answer: object = None
        if self._server is None:
            self._server = ChatServer(self._service, port=0)
            await self._server.__aenter__()
        with self._server.recording(session) as key:
            try:
                answer = await asyncio.wait_for(self._agent(task, Endpoint(self._server.url, key)), self._timeout)
            except asyncio.TimeoutError:
                problem = EnvTimeout(f"the agent took longer than agent.timeout={self._timeout:g} s")
            except Exception as error:
                problem = EnvCrashed(f"the agent raised {type(error).__name__}: {error}")
        for failure in (session.failure, task.failure):
            if failure is not None:
                raise failure
        if problem is None and not (answer is None or isinstance(answer, str)):
            problem = EnvCrashed(f"the agent returned {answer!r:.80}, which is neither a text nor None")
        if not session.recorder.exchanges:
            refused = f"; its request was refused: {session.refusals[-1]}" if session.refusals else ""
            raise problem or EnvCrashed(f"the agent ended without an answer of the policy{refused}")
        if problem is None and isinstance(answer, str) and task.outcome is None:
            actions = self._parser.parse(answer).actions
            if actions:
                await task.step(*actions)
            else:
                task.effects.append((len(session.recorder.exchanges), (), 0.0, False))
        return problem


def _record(
    trajectory: Trajectory, task: Task, session: Session, problem: EnvError | None, format_penalty: float
) -> None:
    """Record the turns of an episode; the reward of a step belongs to the last request before it."""
    trajectory.turns, trajectory.rerendered = turns(session.recorder.exchanges)
    for requests, actions, reward, valid in task.effects:
        turn: Turn = trajectory.turns[max(requests - 1, 0)]
        turn.actions += actions
        turn.reward += reward if valid else reward + format_penalty
        turn.valid = turn.valid and valid
    trajectory.turns[0].env_s = task.env_s
    trajectory.metrics |= task.metrics
    trajectory.success = task.success
    outcome, trajectory.reason = task.outcome or ("truncated", "agent")
    trajectory.outcome = "terminated" if outcome == "terminated" else "truncated"
    if problem is not None and task.outcome is None:
        trajectory.reason = f"agent: {problem}"


# -- agents -----------------------------------------------------------------------------------------------------------


def load_agent(config: AgentConfig) -> Agent:
    """Return the agent of a configuration.

    Raises:
        ConfigError: it cannot be imported, or is not a coroutine function.
    """
    if config.command is not None:
        return _command(config.command)
    assert config.python is not None
    try:
        function = entry_points.load(config.python)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"agent.python={config.python} does not load: {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"agent.python={config.python} is not a coroutine function: write `async def`")
    return function


def _command(command: tuple[str, ...]) -> Agent:
    async def run(task: Task, endpoint: Endpoint) -> str:
        """Run the command; its standard output is the answer. Raises ``RuntimeError`` if it fails."""
        variables = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        given = {"text": task.text, "instructions": task.instructions, "tools": list(task.tools)}
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            with contextlib.suppress(ConnectionError):  # the command does not read its input
                process.stdin.write(json.dumps(given).encode())
                await process.stdin.drain()
            process.stdin.close()
            answer = b""
            while len(answer) <= _LONGEST_ANSWER and (part := await process.stdout.read(1 << 16)):
                answer += part
            if len(answer) > _LONGEST_ANSWER:
                raise RuntimeError(f"the command wrote more than {_LONGEST_ANSWER} bytes")
            status = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(process.pid, signal.SIGKILL)
            await finished(process.wait())
        if status != 0:
            raise RuntimeError(f"the command ended with status {status}")
        return answer.decode("utf-8", "replace")

    return run
