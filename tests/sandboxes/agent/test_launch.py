"""An agent starts from the host's compiled code, or from source if the sandbox has another Python version."""

from __future__ import annotations

import asyncio
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest
from agent_harness import request

from agentkit.sandboxes.agent.channel import listen
from agentkit.sandboxes.agent.launch import command, new_nonce, prepare


@pytest.mark.parametrize("missing", ["agent.py", f"agent.{MAGIC_NUMBER.hex()}"])
async def test_either_form_of_the_agent_is_enough(missing: str, tmp_path: Path) -> None:
    nonce = new_nonce()
    prepare(tmp_path, nonce, idle_timeout=60)
    (tmp_path / missing).unlink()
    async with await listen(tmp_path, nonce) as door:
        agent = await asyncio.create_subprocess_exec(*command(str(tmp_path)))
        try:
            channel = await door.accept(60)
            assert (await channel.exec(request("echo", "hi"))).stdout_bytes == b"hi\n"
            await channel.close()
        finally:
            agent.terminate()
            await asyncio.wait_for(agent.wait(), 60)
