"""Commands that continue after the loss of their connection, and are taken over by another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_harness import LocalAgent, eventually, local_agent, request, sh

from agentkit.errors import SandboxError, UnsupportedFeature
from agentkit.sandboxes.agent.channel import AgentChannel, listen
from agentkit.sandboxes.backend import Process

ECHO = "while read -r line; do echo $line; echo $line >&2; done; echo end"


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[LocalAgent]:
    async with local_agent(tmp_path) as agent:
        yield agent


@contextlib.asynccontextmanager
async def another(agent: LocalAgent) -> AsyncIterator[AgentChannel]:
    async with await listen(agent.directory, agent.nonce) as listener:
        channel = await listener.accept(30)
    try:
        yield channel
    finally:
        await channel.close()


async def read(process: Process, count: int) -> dict[str, bytes]:
    """Read ``count`` bytes of both streams together."""
    found = {"stdout": b"", "stderr": b""}
    async with contextlib.aclosing(process.__aiter__()) as chunks:  # pyright: ignore[reportArgumentType]
        async for stream, data in chunks:
            found[stream] += data
            if sum(map(len, found.values())) >= count:
                break
    return found


async def test_a_command_continues_on_another_connection(agent: LocalAgent) -> None:
    wanted = sh(ECHO, key="k")
    process = await agent.channel.spawn(wanted, linger=60)
    await process.write(b"one\n")
    assert await read(process, 8) == {"stdout": b"one\n", "stderr": b"one\n"}
    await agent.channel.close()
    async with another(agent) as channel:
        # The last bytes did not arrive at the first host's client: they are sent again.
        process, taken = await channel.resume(wanted, (2, 4))
        assert taken == 4
        assert await read(process, 2) == {"stdout": b"e\n", "stderr": b""}
        await process.write(b"two\n")
        assert await read(process, 8) == {"stdout": b"two\n", "stderr": b"two\n"}
        await process.close_stdin()
        result = await process.wait()
        assert (result.exit_code, result.stdout) == (0, "end\n")
        with pytest.raises(SandboxError):
            await channel.resume(wanted, (12, 8))


async def test_an_end_without_a_connection_is_reported(agent: LocalAgent, tmp_path: Path) -> None:
    wanted = sh(f"echo early; read -r line; head -c 100000 /dev/zero; touch {tmp_path}/done; exit 3", key="k")
    process = await agent.channel.spawn(wanted, linger=60)
    assert (await read(process, 6))["stdout"] == b"early\n"
    await process.write(b"go\n")
    await agent.channel.close()
    async with another(agent) as channel:
        assert not (tmp_path / "done").exists()  # output is held back: nothing of it is lost
        process, taken = await channel.resume(wanted, (6, 0))
        assert taken == 3
        result = await process.wait()
        assert (result.exit_code, len(result.stdout_bytes)) == (3, 100_000)


async def test_what_nobody_resumes_is_killed(agent: LocalAgent) -> None:
    await agent.channel.spawn(sh("sleep 1000 & sleep 1000", key="k"), linger=1)
    await agent.channel.spawn(sh("sleep 1000"))
    await eventually(lambda: len(agent.descendants()) >= 3)
    await agent.channel.close()
    await eventually(lambda: not agent.descendants())


async def test_too_much_lost_output_is_an_error(agent: LocalAgent) -> None:
    wanted = sh("head -c 300000 /dev/zero; sleep 1000", key="k")
    process = await agent.channel.spawn(wanted, linger=60)
    await read(process, 300_000)
    await agent.channel.close()
    async with another(agent) as channel:
        for received in ((1000, 0), (300_001, 0), (300_000, 1)):
            with pytest.raises(SandboxError):
                await channel.resume(wanted, received)
        process, _ = await channel.resume(wanted, (300_000 - 65536, 0))
        assert len((await read(process, 65536))["stdout"]) == 65536
        await process.kill()
        assert (await process.wait()).signal == 9


async def test_a_stream_of_input_and_output_is_neither_lost_nor_repeated(agent: LocalAgent) -> None:
    """The connection is replaced many times while a program copies 2 MB."""
    wanted = request("cat", key="k")
    process = await agent.channel.spawn(wanted, linger=60)
    data = b"".join(b"%07d\n" % number for number in range(1 << 18))
    echoed, sent, moves, channel = bytearray(), 0, 0, agent.channel
    async with contextlib.AsyncExitStack() as stack:
        while len(echoed) < len(data):
            piece = data[sent : sent + 40_000]
            await asyncio.wait_for(process.write(piece), 30)
            sent += len(piece)
            echoed += (await read(process, 1))["stdout"]
            if len(echoed) > (moves + 1) * 300_000:
                moves += 1
                await channel.close()
                channel = await stack.enter_async_context(another(agent))
                process, sent = await channel.resume(wanted, (len(echoed), 0))
    assert moves >= 5
    assert bytes(echoed) == data


async def test_lingering_needs_a_key(agent: LocalAgent) -> None:
    with pytest.raises(UnsupportedFeature):
        await agent.channel.spawn(request("true", key="k"))
    with pytest.raises(SandboxError):
        await agent.channel.resume(request("true", key="unknown"), (0, 0))
