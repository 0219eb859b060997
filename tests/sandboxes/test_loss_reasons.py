"""Every reason of a loss is in one table, and the table is in the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentkit.envs as envs
import agentkit.sandboxes as sandboxes
import agentkit.trainers as trainers
from agentkit.errors import LOSS_REASONS

ROOT = Path(__file__).parents[2]
NAMES_A_REASON = frozenset({"lose", "drop", "cut", "condemn", "lose_all", "mark_lost", "_power_off"})
"""Methods one of whose arguments is a reason."""


def texts(node: ast.AST) -> Iterator[str]:
    """Return the texts that an expression may evaluate to."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from texts(value)


def reasons(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "SandboxLost":
                for keyword in node.keywords:
                    if keyword.arg == "reason":
                        yield from texts(keyword.value)
            elif name in NAMES_A_REASON:
                for argument in node.args:
                    yield from texts(argument)
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "_loss" for target in node.targets
        ):
            yield from texts(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "reason":
                    yield from texts(value)


@pytest.mark.parametrize("package", [sandboxes, envs, trainers], ids=lambda one: one.__name__)
def test_the_table_has_every_reason_in_the_code(package) -> None:
    used: dict[str, str] = {}
    for folder in package.__path__:
        for path in sorted(Path(folder).rglob("*.py")):
            for reason in reasons(ast.parse(path.read_text())):
                used.setdefault(reason, str(path.name))
    if package is sandboxes:
        assert len(used) > 8, "the search finds them"
    assert {reason: path for reason, path in used.items() if reason not in LOSS_REASONS} == {}


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "sandboxes" / "failures.md").read_text()
    section = text[text.index("| `reason` | meaning |") + 1 :].split("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)) == dict(LOSS_REASONS)
