"""Environments for verifiers 0.4 (``verifiers.v1``) and prime-rl: a taskset, the ``Env`` that plays it, its chat loop.

Invariant: a failure of the environment is an error on the trace and of the episode, never a reward. The environment
goes back at the end of the episode, also if the model or verifiers fails.

A worker process of verifiers holds the environments that its episodes use: one ``Episodes`` while it serves.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

from agentkit.integrations.episodes import Episodes

__all__ = ["AgentkitEnv", "AgentkitHarness", "AgentkitTaskset"]


class SeedData(vf.TaskData):
    """A task: the seed of the environment."""

    seed: int


class SeedTask(vf.Task[SeedData]):
    """A task without hooks: the environment computes the rewards."""

    @property
    def key(self) -> str:
        """The name, which the system message does not change."""
        return self.data.name or self.hash


class AgentkitConfig(vf.TasksetConfig):
    """Which environment is played."""

    env: str = Field(min_length=1)
    """A registered name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of ``Episodes``: ``retries``, ``kwargs``, ``max_turns``, ``parser``, ``sandbox``, …"""


class AgentkitTaskset(vf.Taskset[SeedTask, AgentkitConfig]):
    """The seeds 0, 1, 2, … of an environment; ``select`` of verifiers chooses some of them."""

    INFINITE = True

    def load(self) -> Iterator[SeedTask]:
        """Yield the tasks."""
        for seed in itertools.count():
            yield SeedTask(SeedData(name=f"{self.config.env}#{seed}", seed=seed), self.config.task)


class AgentkitHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the policy for one answer, in this process.

    verifiers' own chat loop starts a Python process for each turn, which takes about a second of processor time.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Send the conversation to verifiers' endpoint, which records the answer."""
        system, messages = self.resolve_prompt(data)
        assert isinstance(messages, list)  # the environment opens the conversation
        wire: Any = [] if system is None else [{"role": "system", "content": system}]
        wire += [message_to_wire(message) for message in messages]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=wire)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class AgentkitEnvConfig(vf.EnvConfig):
    """Who plays. The policy only answers texts, and needs no container."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class AgentkitEnv(vf.Env[AgentkitEnvConfig]):
    """Plays one episode of an environment of agentkit for each task.

    Raises:
        ConfigError: a setting is wrong or unknown.
        RegistryError: the environment is unknown.
        SandboxError, EnvError: the environment cannot be made in a sandbox.
    """

    _episodes: Episodes | None = None

    async def start(self) -> None:
        """Make the environments; verifiers calls this before the first episode."""
        config = self.taskset.config
        self._episodes = Episodes(config.env, **config.settings)

    async def stop(self) -> None:
        """Close the environments."""
        episodes, self._episodes = self._episodes, None
        if episodes is not None:
            await episodes.close()

    async def run(self, task: SeedTask, agents: vf.Agents) -> None:
        """Play one episode; record ``reward`` and the metrics on its trace.

        An episode that a limit of verifiers ends has the rewards so far.

        Raises:
            EnvError: the environment failed: the episode has no reward.
            EnvFailureBudgetExceeded: too many of the latest environments failed.
        """
        episodes = self._episodes
        if episodes is None:
            raise RuntimeError("episodes are played while verifiers serves the environment: use `async with serving()`")
        if task.data.system_prompt is None:
            task = task.with_system_prompt(episodes.system)
        async with agents.player.interaction(task) as interaction:
            episode = await episodes.begin(task.data.seed)
            try:
                segment = await interaction.turn(episode.observation)
                while not segment.terminated:
                    reply = await episode.answer(segment.last_reply)
                    if reply.done:
                        break
                    segment = await interaction.turn(reply.text)
            finally:
                await episode.end()
        trace = interaction.trace
        if trace.ok:  # otherwise the model failed, and the episode has no reward either
            trace.record_reward("reward", episode.reward)
            trace.record_metrics(episode.metrics)
