"""Examples of docs/sandboxes/ that need Docker or a server run exactly as they are printed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

# The pages also show `pip install 'agentkit-rl[docker]'` and `agentkit sandbox build`: .ci/docker does both.
PAGES = Path(__file__).parents[2] / "docs" / "sandboxes"


def blocks(page: str, marker: str) -> list[str]:
    """Return the Python blocks of a page that carry this marker."""
    text = (PAGES / page).read_text()
    pattern = rf"<!-- run by: tests/sandboxes/test_docs\.py: {re.escape(marker)} -->\n```python\n(.*?)```"
    return re.findall(pattern, text, re.S)


def marked() -> list[str]:
    """Return the blocks that run on the default back end."""
    return blocks("index.md", "marked()") + blocks("recipes.md", "marked()")


def remote() -> list[str]:
    """Return the blocks that need a sandbox server."""
    return blocks("backends.md", "remote()")


async def output_of(program: str, directory: Path, **env: str) -> str:
    """Return the output of a program; fail if the program fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        cwd=directory,
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    """Run `agentkit sandbox serve` with local sandboxes; yield its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentkit", "sandbox", "serve", "--backend", "local", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield line.decode().split()[-1]
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except asyncio.TimeoutError:
            process.kill()


def test_the_pages_have_these_blocks() -> None:
    assert (len(marked()), len(remote())) == (3, 1)


@pytest.mark.docker
@pytest.mark.parametrize("index", range(3))
@pytest.mark.usefixtures("docker_backend")
async def test_the_examples_work_by_default(index: int, tmp_path: Path) -> None:
    assert await output_of(marked()[index], tmp_path) == ("hi\n\n", "0 45\n\n", "[1.0, 0.0, 0.0]\n")[index]


async def test_the_remote_example_uses_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", "a-token-of-this-test-alone")
    async with server() as url:
        out = await output_of(remote()[0], tmp_path, AGENTKIT_SANDBOX_URL=url)
    assert out == "hello from the server\n\n"
