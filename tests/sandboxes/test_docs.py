"""What docs/sandboxes.md shows of Docker is run as it stands there: the ten-line example and its kin."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

# In the page: pip install 'agentkit-rl[docker]' and agentkit sandbox build, which .ci/docker does with this project.
PAGE = Path(__file__).parents[2] / "docs" / "sandboxes.md"


def marked() -> list[str]:
    """The Python blocks that the page leaves to this file."""
    return re.findall(
        r"<!-- run by: tests/sandboxes/test_docs\.py[^>]*-->\n```python\n(.*?)```", PAGE.read_text(), re.S
    )


def test_there_are_such_blocks() -> None:
    assert len(marked()) == 3


@pytest.mark.docker
@pytest.mark.parametrize("index", range(3))
@pytest.mark.usefixtures("docker_backend")
async def test_the_examples_work_by_default(index: int, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", marked()[index], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    assert out.decode() == ("hi\n\n", "0 45\n\n", "[1.0, 0.0, 0.0]\n")[index]
