"""The public names of agentkit: their static types, and the modules that importing them loads."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import agentkit

SNIPPET = """
import agentkit

reveal_type(agentkit.make)
reveal_type(agentkit.train)
reveal_type(agentkit.evaluate)
reveal_type(agentkit.load_config("run.yaml"))
reveal_type(agentkit.train({"env": {"id": "FrozenLake-v1"}}).metrics)
reveal_type(agentkit.Sandbox)
reveal_type(agentkit.SyncSandbox)
reveal_type(agentkit.SandboxPool)
reveal_type(agentkit.TextEnv)
reveal_type(agentkit.Trajectory)
agentkit.trian
"""
TYPES = [
    "-> Any",
    "-> RunResult",
    "-> EvalResult",
    'is "RunConfig"',
    'is "Mapping[str, float]"',
    "type[Sandbox]",
    "type[SyncSandbox]",
    "type[SandboxPool]",
    "type[TextEnv]",
    "type[Trajectory]",
    '"trian" is not a known attribute of module "agentkit"',
]


def test_all_names_resolve_and_are_listed() -> None:
    for name in vars(agentkit)["__all__"]:
        assert getattr(agentkit, name).__name__ == name
        assert name in dir(agentkit)
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it has .*train"):
        _ = agentkit.trian  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("package", ["agentkit", "agentkit.sandboxes"])
def test_type_checkers_see_the_same_names_as_users(package: str) -> None:
    module = importlib.import_module(package)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING",)]
    declared = {
        alias.asname or alias.name: node.module
        for block in blocks
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == module._MODULES
    assert sorted(module.__all__) == sorted(declared)


def test_importing_agentkit_loads_nothing_heavy() -> None:
    script = (
        "import agentkit, sys\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gymnasium', 'pydantic', 'ray', 'docker', 'vllm', 'httpx'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "for name in agentkit.__all__: getattr(agentkit, name)\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'ray', 'docker', 'vllm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.slow
def test_a_type_checker_sees_real_types(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    root = Path(__file__).parents[2]
    (tmp_path / "snippet.py").write_text(SNIPPET)
    package = tmp_path / "agentkit"  # as an installation has it: the sources map further folders into the package
    package.mkdir()
    for path in (root / "agentkit").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("envs", "images", "sandboxes", "trainers"):
        (package / name).symlink_to(root / name)
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "snippet.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if "snippet.py:" in line]
    assert len(lines) == len(TYPES), result.stdout
    for line, expected in zip(lines, TYPES, strict=True):
        assert expected in line
