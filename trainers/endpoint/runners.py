"""How agents run: as a coroutine of this process, a command, a command in a sandbox, or a service.

Invariant: only a failure of the agent itself leaves its call as an ordinary exception. ``AgentUnavailable`` says that
the host failed, ``UnexplainedCrash`` that either the host or the agent did. A sandbox serves one episode, and its only
network access is the endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from agentkit import entry_points
from agentkit.config import AgentConfig
from agentkit.errors import AgentUnavailable, CommandNotFound, ConfigError, SandboxError, UnexplainedCrash
from agentkit.sandboxes.attribution import cause_of
from agentkit.sandboxes.egress.proxy import PORT
from agentkit.sandboxes.pool.health import usage_of
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.spec import Network, SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.tool_calls import Tool

if TYPE_CHECKING:
    from agentkit.sandboxes.sandbox import Sandbox

MODEL = "policy"
"""The model's name in an agent's requests."""
_LONGEST_ANSWER = 1 << 20
"""Bytes that are read of a command's output."""
_LENGTH_CHECK_S = 0.5
"""Seconds between two looks at the length of this output."""
_SHOWN = 300
"""Characters that errors quote of what an agent said."""
_POOL_SIZE = 4096
_POOL_TIMEOUT = 600.0
"""Seconds to wait for a sandbox while many are being created."""


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


class Task(Protocol):
    """The environment of one episode, as an agent sees it."""

    text: str
    """The first observation, which states the task."""
    instructions: str
    """The rules of the environment, and the format of answers that the agent returns."""
    tools: tuple[Tool, ...]
    """Tools of the environment, in the form of requests. A call is the action ``{"name": …, "arguments": …}``."""

    async def step(self, *actions: str) -> Step:
        """Carry out actions of the environment, one after the other."""
        ...


Agent = Callable[[Task, Endpoint], Awaitable["str | None"]]
"""Plays one episode, and returns its answer; None if its steps say all."""


class AgentRunner(Protocol):
    """Provides the agents of a run."""

    def agent(self, url: str) -> AbstractAsyncContextManager[Agent]:
        """Provide an agent for one episode, while the context lasts.

        Args:
            url: base URL of the endpoint, the same for all episodes.

        Raises:
            AgentUnavailable: there is no place where it could run.
        """
        ...

    async def close(self) -> None:
        """Remove what agents needed. Idempotent."""
        ...


def make_runner(config: AgentConfig) -> AgentRunner:
    """Return what runs the agent of a configuration.

    Raises:
        ConfigError: it cannot be imported, is not a coroutine function, or its sandbox cannot exist.
    """
    if config.command is not None and config.sandbox != "none":
        return SandboxedCommand(config)
    if config.command is not None:
        return _Shared(_command(config.command))
    if config.url is not None:
        return Service(config.url, config.timeout)
    assert config.python is not None
    return _Shared(entry_points.load_coroutine(config.python, "agent.python"))


class _Shared:
    """One agent for all episodes, which needs nothing in advance."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def agent(self, url: str) -> AbstractAsyncContextManager[Agent]:
        return contextlib.nullcontext(self._agent)

    async def close(self) -> None:
        """Close nothing."""


def _given(task: Task) -> dict[str, Any]:
    """Return what an agent outside of this process is told about a task."""
    return {"text": task.text, "instructions": task.instructions, "tools": list(task.tools)}


def _variables(endpoint: Endpoint) -> dict[str, str]:
    return {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}


def _answer_of(output: bytes, exit_code: int | None, errors: str = "") -> str:
    """Return the answer that a command wrote. Raises ``RuntimeError`` if it failed."""
    if len(output) > _LONGEST_ANSWER:
        raise RuntimeError(f"the command wrote more than {_LONGEST_ANSWER} bytes")
    if exit_code != 0:
        raise RuntimeError(f"the command ended with status {exit_code}{errors and ': '}{errors[-_SHOWN:].strip()}")
    return output.decode("utf-8", "replace")


# -- a command on this machine ----------------------------------------------------------------------------------------


def _command(command: Sequence[str]) -> Agent:
    async def run(task: Task, endpoint: Endpoint) -> str:
        """Run the command; its standard output is the answer. Raises ``RuntimeError`` if it fails."""
        variables = _variables(endpoint)
        direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]
        variables["NO_PROXY"] = variables["no_proxy"] = ",".join(filter(None, direct))
        # Not pipes, which processes that leave the group would keep open.
        with tempfile.TemporaryFile() as shown, tempfile.TemporaryFile() as said:
            shown.write(json.dumps(_given(task)).encode())
            shown.seek(0)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=shown, stdout=said, env={**os.environ, **variables}, start_new_session=True
            )
            ending = asyncio.ensure_future(process.wait())
            try:
                while not (await asyncio.wait({ending}, timeout=_LENGTH_CHECK_S))[0]:
                    if os.fstat(said.fileno()).st_size > _LONGEST_ANSWER:
                        break
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                    os.killpg(process.pid, signal.SIGKILL)
                await finished(ending)
            said.seek(0)
            return _answer_of(said.read(_LONGEST_ANSWER + 1), ending.result())

    return run


# -- a command in a sandbox -------------------------------------------------------------------------------------------


def sandbox_spec(config: AgentConfig, address: str) -> SandboxSpec:
    """Return the specification of the sandboxes of an agent.

    Args:
        config: the agent.
        address: ``host:port`` of the endpoint, the only server that the sandboxes reach.

    Raises:
        ConfigError: ``config.sandbox_spec`` is invalid.
    """
    try:
        return SandboxSpec(**{"ttl": None, **config.sandbox_spec, "network": Network.forward(address)})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"agent.sandbox_spec: {problems}") from None


class SandboxedCommand:
    """Runs a command in a sandbox, a new one for each episode."""

    def __init__(self, config: AgentConfig) -> None:
        assert config.command is not None
        sandbox_spec(config, "127.0.0.1:1")
        self._config, self._command = config, config.command
        self._pool: SandboxPool | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def agent(self, url: str) -> AsyncIterator[Agent]:
        """Provide a command in a sandbox that reaches only ``url``. Raises ``AgentUnavailable``."""
        try:
            pool = await self._started(url)
            lease = await pool.acquire()
        except SandboxError as error:
            raise AgentUnavailable(f"there is no sandbox for the agent: {error}") from error
        try:
            yield lambda task, endpoint: self._run(lease.box, task, endpoint)
        finally:
            lease.release(discard=True)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _started(self, url: str) -> SandboxPool:
        async with self._starting:
            if self._pool is None:
                spec, backend = sandbox_spec(self._config, urlsplit(url).netloc), self._config.sandbox
                pool = SandboxPool(
                    spec, backend, max_size=_POOL_SIZE, acquire_timeout=_POOL_TIMEOUT, drain_timeout=0.0,
                    host=usage_of(backend),
                )  # fmt: skip
                await pool.start()
                self._pool = pool
        return self._pool

    async def _run(self, box: Sandbox, task: Task, endpoint: Endpoint) -> str:
        """Run the command; its standard output is the answer.

        Raises ``RuntimeError`` if it fails, ``AgentUnavailable`` or ``UnexplainedCrash`` if the sandbox fails.
        """
        here = Endpoint(f"http://127.0.0.1:{PORT}{urlsplit(endpoint.url).path}", endpoint.key, endpoint.model)
        limit = 2 * _LONGEST_ANSWER + 2  # of which the beginning and the end are kept
        try:
            result = await box.exec(
                self._command, stdin=json.dumps(_given(task)), env=_variables(here), output_limit=limit,
                timeout=self._config.timeout,
            )  # fmt: skip
        except CommandNotFound as error:
            raise RuntimeError(str(error)) from error
        except SandboxError as error:
            cause = await cause_of(error, box)
            if cause == "program":
                raise RuntimeError(f"the agent's program ended its sandbox: {error}") from error
            kind = AgentUnavailable if cause == "external" else UnexplainedCrash
            raise kind(f"the agent's sandbox failed: {error}") from error
        if result.timed_out:
            raise RuntimeError(f"the command took longer than agent.timeout={self._config.timeout:g} s")
        return _answer_of(result.stdout_bytes, result.exit_code, result.stderr)


# -- a service --------------------------------------------------------------------------------------------------------


class Service:
    """An agent behind an address: a POST request for each episode.

    Args:
        url: the address.
        timeout: seconds for one episode.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)), limits=limits)

    def agent(self, url: str) -> AbstractAsyncContextManager[Agent]:
        return contextlib.nullcontext(self._play)

    async def close(self) -> None:
        await self._client.aclose()

    async def _play(self, task: Task, endpoint: Endpoint) -> str | None:
        """Post a task and wait for the answer.

        Raises ``RuntimeError`` if the service refuses the task, ``UnexplainedCrash`` if it fails.
        """
        found = {"base_url": endpoint.url, "api_key": endpoint.key, "model": endpoint.model}
        try:
            response = await self._client.post(self._url, json={**found, **_given(task)})
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise UnexplainedCrash(f"the agent at {self._url} cannot be reached: {reason}") from error
        said = response.text[:_SHOWN]
        if response.status_code >= 500:
            raise UnexplainedCrash(f"the agent at {self._url} failed with status {response.status_code}: {said}")
        if response.status_code != 200:
            raise RuntimeError(f"the agent at {self._url} refused the task with status {response.status_code}: {said}")
        try:
            answer = response.json()["answer"]
        except (ValueError, KeyError, TypeError):
            raise RuntimeError(f'the agent at {self._url} did not answer {{"answer": …}} but {said!r}') from None
        return answer
