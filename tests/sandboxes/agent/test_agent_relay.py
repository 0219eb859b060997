"""Connections from inside a sandbox are relayed to its host."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from agent_harness import eventually, local_agent

from agentkit.errors import SandboxLost


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
async def agent(tmp_path):
    port = _free_port()
    async with local_agent(tmp_path, relay_port=port) as agent:
        agent.port = port  # type: ignore[attr-defined]
        yield agent


async def _echo(agent) -> None:
    """Give back what comes, upside down."""

    async def serve(stream) -> None:
        while data := await stream.read():
            await stream.write(data.swapcase())
        stream.end()

    tasks = set()
    async for stream in agent.channel.relays():
        tasks.add(asyncio.ensure_future(serve(stream)))
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_both_directions_and_both_ends(agent):
    server = asyncio.ensure_future(_echo(agent))
    await agent.channel.ping(30)

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
        data = os.urandom(300_000).hex().encode() + b"%d" % number
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data.swapcase()
        writer.close()

    for _ in range(3):
        await asyncio.gather(*[one(number) for number in range(20)])
    await eventually(lambda: not agent.channel._connection._relays)
    assert len(os.listdir(f"/proc/{agent.pid}/fd")) < 14
    await agent.channel.close()
    await server


async def test_a_refused_connection(agent):
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


async def test_a_client_that_does_not_read_is_not_read_from(agent):
    arrivals = agent.channel.relays()
    arriving = asyncio.ensure_future(arrivals.__anext__())
    await agent.channel.ping(30)
    _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    stream = await arriving
    writer.transport.set_write_buffer_limits(0)
    sent = 0
    stuck = False
    while not stuck:
        writer.write(b"x" * 65536)
        sent += 65536
        try:
            await asyncio.wait_for(writer.drain(), 1)
        except asyncio.TimeoutError:
            stuck = True
    assert sent < 16 << 20  # The kernel's own buffers and one window.
    received = 0
    while received < sent:
        received += len(await stream.read())
    stream.close()
    stream.close()
    writer.close()
    await arrivals.aclose()


async def test_the_end_of_the_agent_ends_them(agent):
    arrivals = agent.channel.relays()
    arriving = asyncio.ensure_future(arrivals.__anext__())
    await agent.channel.ping(30)
    _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    stream = await arriving
    agent.process.kill()
    with pytest.raises(SandboxLost):
        await stream.read()
    with pytest.raises(StopAsyncIteration):
        await arrivals.__anext__()
    writer.close()
