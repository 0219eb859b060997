"""Start and reach the agents of sandboxes on this host, for the back ends that run one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from agentkit.errors import StartTimeout
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import launch
from agentkit.sandboxes.agent.channel import AgentChannel, AgentListener, listen
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.egress import proxy
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished, stopped


async def prepare(
    id: str, spec: SandboxSpec, isolation: str, *, env: Mapping[str, str], filter: bytes | None, bundled: bool
) -> AgentListener:
    """Write the settings of an agent into the sandbox's directory and listen for it.

    Args:
        id: the sandbox.
        spec: its specification.
        isolation: what its channel reports.
        env: variables of every command.
        filter: the filter of system calls.
        bundled: the agent's code is in the bundle of the interpreter.
    """
    launch.prepare(
        paths.sandbox_directory(id),
        launch.new_nonce(),
        idle_timeout=spec.idle_timeout,
        env={**env, **proxy.environment(spec)},
        relay_port=proxy.relay_port(spec),
        filter=filter,
        bundled=bundled,
    )
    return await listen_again(id, spec, isolation)


async def listen_again(id: str, spec: SandboxSpec, isolation: str) -> AgentListener:
    """Listen for an agent that is already running. Raises ``OSError`` if its secret cannot be read."""
    directory = paths.sandbox_directory(id)
    nonce = launch.nonce_of(directory)
    return await listen(directory, nonce, isolation=isolation, workdir=spec.workdir, idle_timeout=spec.idle_timeout)


async def accept(
    listener: AgentListener, spec: SandboxSpec, timeout: float, ended: Coroutine[Any, Any, StartTimeout]
) -> AgentChannel:
    """Return the channel of the agent, with its egress proxy, and close the listener.

    Args:
        listener: where the agent connects.
        spec: the specification of the sandbox.
        timeout: seconds to wait.
        ended: returns an error as soon as the sandbox has ended.

    Raises:
        StartTimeout: the agent did not connect in time, or the sandbox has ended.
    """
    arrival, end = asyncio.ensure_future(listener.accept(timeout)), asyncio.ensure_future(ended)
    try:
        await asyncio.wait({arrival, end}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done():
            raise end.result()
        channel = arrival.result()
    except BaseException:
        if arrival.done() and not arrival.cancelled() and arrival.exception() is None:
            await arrival.result().close()
        raise
    finally:
        await stopped({arrival, end})
        await listener.close()
    proxy.start(channel, spec.network)
    return channel


@contextlib.asynccontextmanager
async def connected(
    channel: AgentChannel | None, attach: Callable[[], Awaitable[tuple[SandboxSpec, Channel]]]
) -> AsyncIterator[AgentChannel]:
    """Yield ``channel`` if it is open, else a temporary one from ``attach``."""
    if channel is not None and not channel.lost.done():
        yield channel
        return
    _, temporary = await attach()
    try:
        yield temporary  # pyright: ignore[reportReturnType]
    finally:
        await finished(temporary.close())
