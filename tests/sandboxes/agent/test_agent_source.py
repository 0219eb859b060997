"""The source of the agent is one file that any image with Python 3.8 can run."""

from __future__ import annotations

import ast
import sys

from agentkit.sandboxes.agent import agent

_SMALL = {
    "_collections", "_ctypes", "_signal", "_socket", "_stat", "_struct", "errno", "posix", "select", "sys", "time",
}  # fmt: skip


def _tree() -> ast.Module:
    with open(agent.__file__, encoding="utf-8") as source:
        return ast.parse(source.read(), feature_version=(3, 8))


def test_it_is_python_3_8():
    assert _tree().body


def test_only_small_modules_are_imported():
    tree = _tree()
    at_start = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    at_start |= {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert at_start <= _SMALL
    everywhere = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert everywhere - at_start == {"tarfile"}
    assert everywhere <= set(sys.stdlib_module_names) | _SMALL
