"""The paths on docs/architecture.md exist, and its tree lists every folder and module."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TREE = PAGE.partition("## Layout\n\n```\n")[2].partition("```")[0]
PACKAGES = ("agentkit", "envs", "sandboxes", "trainers")


def tree_paths() -> list[str]:
    """Return the paths of the tree, with their parent folders."""
    paths, folders = [], []
    for line in TREE.splitlines():
        match = re.match(r"( *)(\S+)", line)
        assert match, line
        depth = len(match[1]) // 2
        folders[depth:] = [match[2]]
        paths.append("".join(folders))
    return paths


def test_every_path_exists() -> None:
    named = re.findall(r"`((?:agentkit|envs|sandboxes|trainers|tests|benchmarks|docs|examples)/[\w/.]*)`", PAGE)
    assert len(named) > 20
    named = [path for path in named if path not in ("agentkit/base", "agentkit/env")]  # images
    assert [path for path in (*tree_paths(), *named) if not (ROOT / path).exists()] == []


def test_the_tree_is_complete() -> None:
    """A folder stands for its modules, unless the tree lists some of them."""
    listed = tree_paths()
    leaves = [
        path for path in listed if path.endswith("/") and not any(p != path and p.startswith(path) for p in listed)
    ]
    missing = [
        str(module)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if (module := path.relative_to(ROOT)).name not in ("__init__.py", "__main__.py")
        and str(module) not in listed
        and not str(module).startswith((*leaves, "envs/swebench/"))
    ]
    assert missing == []
