"""The real agent as an ordinary process of this machine, and helpers for its tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from agentkit.sandboxes.agent.channel import AgentChannel, listen
from agentkit.sandboxes.agent.launch import command, new_nonce, prepare
from agentkit.sandboxes.types import ExecRequest

PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)
"""The interpreter inside; an agent has to run on older and newer ones than its host."""


def request(
    *argv: str,
    timeout: float = 60.0,
    limit: int = 1 << 20,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    key: str | None = None,
) -> ExecRequest:
    return ExecRequest(argv, timeout, limit, cwd, env or {}, stdin, key)


def sh(script: str, **arguments: object) -> ExecRequest:
    return request("sh", "-c", script, **arguments)  # type: ignore[arg-type]


@dataclass
class LocalAgent:
    directory: Path
    process: asyncio.subprocess.Process
    channel: AgentChannel
    nonce: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def memory(self) -> int:
        return psutil.Process(self.pid).memory_info().rss

    def descendants(self) -> list[psutil.Process]:
        """Return running descendants of the agent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid).children(recursive=True)
            return [process for process in found if lives(process)]
        return []


def lives(process: psutil.Process) -> bool:
    """Return whether the process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.asynccontextmanager
async def local_agent(
    directory: Path,
    *,
    idle_timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
    relay_port: int | None = None,
    python: str = PYTHON,
) -> AsyncIterator[LocalAgent]:
    nonce = new_nonce()
    prepare(directory, nonce, idle_timeout=idle_timeout, env=env, relay_port=relay_port)
    listener = await listen(directory, nonce, isolation="none", idle_timeout=idle_timeout)
    process = await asyncio.create_subprocess_exec(*command(str(directory), python))
    try:
        channel = await listener.accept(60)
        agent = LocalAgent(directory, process, channel, nonce)
        try:
            yield agent
        finally:
            await channel.close()
    finally:
        await listener.close()
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(18)  # SIGCONT: a test may have stopped it.
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)
        # The agent's own end leaves nothing; a test that killed it has to clean up after it.
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


async def eventually(condition, seconds: float = 30.0) -> None:
    """Wait until ``condition()`` holds."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"still not so after {seconds} s")
        await asyncio.sleep(0.02)
