"""Every fenced block of the README, CONTRIBUTING and docs/ is run, or says in a comment above it what runs it.

The blocks of a page run one after the other in one directory, which holds a link to ``examples/``: a later one may use
what an earlier one made. ``bash`` runs in a shell with this environment's commands, ``python`` in an interpreter,
``yaml`` is validated as a run's configuration. An HTML comment directly above a block may change that:

``<!-- run with: ARGUMENTS -->``
    ``ARGUMENTS`` are appended to each ``agentkit run`` and ``agentkit eval``, and passed as ``overrides`` to
    ``agentkit.train("FILE.yaml")``, to make a long one short.
``<!-- run by: FILE -->``, ``<!-- run by: FILE: TEXT -->``
    Another file runs it: every command of the block (or ``TEXT``) must stand in that file.
``<!-- same as: FILE -->``
    It must be the content of that file.

Blocks without a language are drawings and output, and must not look like commands. Any other language fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from requiring import require

from agentkit.config_io import parse_config
from agentkit.errors import EngineUnavailable
from agentkit.sandboxes.backends.local.backend import LocalBackend

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ \t]*$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!--\s*(run with|run by|same as)\b:? *([^\n]*?) *-->\n *\Z")
COMMAND = re.compile(r"^ *(?:\\$ |agentkit |pip |make |python |git |\\.ci/)", re.MULTILINE)
LONG = ("agentkit run", "agentkit eval", "agentkit.train")
TIMEOUT_S = 300


@dataclass
class Block:
    language: str
    text: str
    line: int
    marker: str = ""
    argument: str = ""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        block = Block(
            language, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE), text.count("\n", 0, match.start()) + 1
        )
        if marker := MARKER.search(text[: match.start()]):
            block.marker, block.argument = marker.groups()
        yield block


def verify_elsewhere(block: Block) -> None:
    name, _, text = block.argument.partition(": ")
    content = (ROOT / name).read_text(encoding="utf-8")
    for wanted in [text] if text else commands(block.text):
        assert wanted in content, f"{name} does not run {wanted!r}"


def commands(text: str) -> list[str]:
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def run_bash(block: Block, directory: Path) -> None:
    lines = block.text.splitlines()
    if block.marker == "run with":
        lines = [
            f"{line.partition(' #')[0].rstrip()} {block.argument}" if line.startswith(LONG) else line for line in lines
        ]
    check_run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], directory)


def check_run(command: list[str], directory: Path) -> None:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"


def do(block: Block, directory: Path) -> None:
    if block.marker == "run by":
        verify_elsewhere(block)
    elif block.marker == "same as":
        assert block.text == (ROOT / block.argument).read_text(encoding="utf-8")
    elif block.language in ("", "text"):
        assert not COMMAND.search(block.text), "a command in a block without a language does not run; call it bash"
    elif block.language == "bash":
        run_bash(block, directory)
    elif block.language == "python":
        overrides = f'.yaml", overrides={block.argument.split()!r}'
        text = block.text.replace('.yaml"', overrides) if block.marker == "run with" else block.text
        check_run([sys.executable, "-c", text], directory)
    elif block.language == "yaml":
        whole = re.search(r"^env:", block.text, re.MULTILINE)
        parse_config(block.text if whole else f"env: {{id: X-v0}}\n{block.text}")
    else:
        pytest.fail(f"a block in {block.language or 'no language'!r} is neither run nor marked")


def require_local_sandboxes() -> None:
    try:
        asyncio.run(LocalBackend().start())
    except EngineUnavailable as error:
        require(False, str(error))


def is_long(page: Path) -> bool:
    return any(command in block.text for block in blocks(page) for command in LONG)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=pytest.mark.slow if is_long(page) else ())
        for page in PAGES
    ],
)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    if 'backend="local"' in page.read_text(encoding="utf-8"):
        require_local_sandboxes()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        try:
            do(block, tmp_path)
        except AssertionError as error:
            pytest.fail(f"{page.relative_to(ROOT)}:{block.line}: {error}", pytrace=False)


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in PAGES[:2]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_markers_are_understood(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run with: a=1 -->\n```bash\nagentkit run x # why\n```\n\n"
        "1. item\n\n    ```python\n    if 1:\n        2\n    ```\n"
    )
    first, second = blocks(page)
    assert (first.language, first.text, first.line, first.marker, first.argument) == (
        "bash", "agentkit run x # why\n", 2, "run with", "a=1",
    )  # fmt: skip
    assert (second.language, second.text, second.marker) == ("python", "if 1:\n    2\n", "")
    assert commands("# a\nb # c\n\nd\n") == ["b", "d"]
