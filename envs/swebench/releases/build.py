"""From two consecutive releases to a task: the change of the sources is the solution, that of the tests decides.

Invariant: a task is written only if, in three runs each, its FAIL_TO_PASS tests fail before the solution and pass after
it, and its PASS_TO_PASS tests always pass; tests that cannot be told apart by the official parser are in neither.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentkit.envs.swebench import evaluation, grading, supply
from agentkit.envs.swebench.instance import Instance, load
from agentkit.envs.swebench.releases import environment, index, store, trees
from agentkit.envs.swebench.releases.trees import Tree
from agentkit.errors import ConfigError
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import Resources

RUNS = 3
TEST_TIMEOUT = 600.0
NOBODY = "65534:65534"
PYTEST = ("pytest==7.4.4", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2")
"""What runs the tests: old ones break under newer versions."""
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
"""What pytest obeys at the top of a repository: the tests' own, not the agent's."""
_PYTEST = """\
import os, sys, pytest
roots = os.environ["PYTHONPATH"] = sys.argv.pop(1)
class Repository:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.path[:0] = [os.getcwd(), *roots.split(":")]
sys.exit(pytest.main(plugins=[Repository()]))
"""
"""Runs pytest, which finds the repository only after itself and its plugins: nothing there, a `sitecustomize`, a
`pytest.py` or the metadata of a package, can take their place."""
_PARSER = "parse_log_pytest"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """Two consecutive releases of a package."""

    package: str
    old: str
    new: str
    packages: tuple[str, ...] = ()
    """What the package and its tests need besides pytest, as pip's requirements."""
    sha256: tuple[str, str] | None = None
    """Of the two source archives; None trusts the index."""
    statement: str | None = None
    """The issue, where the change log does not tell it."""

    @property
    def id(self) -> str:
        name = index.normal(self.package)
        return f"{name}__{name}-{self.new}".lower()


@dataclass(frozen=True)
class Change:
    """What differs between the two releases."""

    patch: str
    test_patch: str
    modules: tuple[str, ...]
    """Test modules that the test patch changes or adds."""
    statement: str


async def build(pair: Pair, progress: Progress = lambda _: None) -> Instance:
    """Make the task of a pair, its image included; what is there already is made again only where it changed.

    Raises ``ConfigError`` if these releases give no task, ``SandboxError`` if a sandbox or an image fails.
    """
    digests = pair.sha256 or (None, None)
    archives = [
        await asyncio.to_thread(index.fetch, pair.package, version, store.sources(), digest)
        for version, digest in zip((pair.old, pair.new), digests, strict=True)
    ]
    old, new = (trees.read(archive) for archive in archives)
    change = difference(pair, old, new)
    progress("building the image")
    built = await environment.build(await asyncio.to_thread(environment.builder), old, pair.old)
    packages = (*PYTEST, *pair.packages)
    title = f"{pair.package} {pair.old}"
    image = await asyncio.to_thread(environment.make, pair.id, title, old, built, packages)
    draft = _row(pair, change, image, await _commit(image), old)
    progress(f"running the tests, {RUNS} times before and after")
    before, after = await _runs(draft)
    fail_to_pass, pass_to_pass = sorted_out(before, after, grading.official().passed)
    if not fail_to_pass:
        raise ConfigError(f"{pair.id}: no test fails before the change and passes after it, in all of {RUNS} runs")
    return await asyncio.to_thread(_written, {**draft, "FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass})


def difference(pair: Pair, old: Tree, new: Tree) -> Change:
    """What changed. Raises ``ConfigError`` if that is no task: no sources, no tests, nothing that says why."""
    patch = trees.diff(old, new, lambda path: not trees.is_test(path))
    test_patch = trees.diff(old, new, trees.is_test)
    modules = tuple(path for path in trees.changed(old, new) if trees.is_test_module(path) and path in new)
    if not patch or not modules:
        raise ConfigError(
            f"{pair.package} {pair.old} to {pair.new} gives no task: its source archives differ in no "
            f"{'test module' if patch else 'source file'}"
        )
    said = pair.statement or trees.statement(old, new)
    if said is None:
        raise ConfigError(f"{pair.package} {pair.new} holds no change log that says what changed; give a statement")
    statement = (
        f"The next release of {pair.package} after {pair.old} brings what follows. Make it so.\n\n{said.strip()}\n"
    )
    return Change(patch, test_patch, modules, statement)


def eval_script(commit: str, old: Tree, change: Change) -> str:
    """The evaluation script, in the official form.

    Whatever belongs to the tests is what it was, before the test patch is applied: folders of tests with everything
    in them, changed test modules elsewhere, and what pytest obeys at the top of the repository.
    """
    folders = trees.test_folders(old)
    single = [path for path in (*change.modules, *_CONFIGURATION) if not any(path.startswith(f"{f}/") for f in folders)]
    known = [*folders, *(path for path in single if path in old)]
    strange = [path for path in single if path not in old]
    restore = f"git checkout {commit} {shlex.join(known)}" if known else ":"
    mark = "EOF_TEST_PATCH"
    while mark in change.test_patch:
        mark += "_"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        "cd /testbed",
        f"rm -rf {shlex.join([*folders, *strange])}",
        restore,
        f"git apply -v - <<'{mark}'\n{change.test_patch}{mark}",
        ": '>>>>> Start Test Output'",
        f'env -u PYTHONPATH python3 -P -c {shlex.quote(_PYTEST)} "$PYTHONPATH" -rA -p no:cacheprovider -o addopts= '
        f"--continue-on-collection-errors {shlex.join(change.modules)}",
        ": '>>>>> End Test Output'",
        restore,
    ]
    return "\n".join(lines) + "\n"


def sorted_out(
    before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]], passed: Callable[[str, Any], bool]
) -> tuple[list[str], list[str]]:
    """FAIL_TO_PASS and PASS_TO_PASS of several runs, each test → status; ``passed`` is the official rule."""
    names = {name for run in after for name in run}
    # The official parser cuts names at white space: what is cut inside its brackets may stand for several tests.
    whole = sorted(name for name in names if name.count("[") <= name.count("]"))
    fixed = [name for name in whole if all(passed(name, run) for run in after)]
    fail_to_pass = [name for name in fixed if not any(passed(name, run) for run in before)]
    pass_to_pass = [name for name in fixed if all(passed(name, run) for run in before)]
    return fail_to_pass, pass_to_pass


def _row(pair: Pair, change: Change, image: str, commit: str, old: Tree) -> dict[str, Any]:
    name = index.normal(pair.package)
    return {
        "instance_id": pair.id,
        "repo": f"{name}/{name}",
        "version": pair.old,
        "base_commit": commit,
        "environment_setup_commit": commit,
        "patch": change.patch,
        "test_patch": change.test_patch,
        "problem_statement": change.statement,
        "hints_text": "",
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "image": image,
        "eval_script": eval_script(commit, old, change),
        "log_parser": _PARSER,
        "eval_type": "pass_and_fail",
        "user": NOBODY,
        "packages": [*PYTEST, *pair.packages],
    }


async def _commit(image: str) -> str:
    async with await Sandbox.create(image=image, user=NOBODY, readonly_root=False, pull="never") as box:
        return (await box.exec("git rev-parse HEAD", cwd=evaluation.REPOSITORY, check=True)).stdout.strip()


async def _runs(row: Mapping[str, Any]) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    before = [await _statuses(row, "") for _ in range(RUNS)]
    after = [await _statuses(row, row["patch"]) for _ in range(RUNS)]
    return before, after


async def _statuses(row: Mapping[str, Any], patch: str) -> Mapping[str, str]:
    async with await Sandbox.create(supply.spec_of(Instance(row), Resources())) as box:
        if patch and not await evaluation.apply(box, patch.encode()):
            raise ConfigError(f"{row['instance_id']}: the change of the sources does not apply as a patch")
        log = await evaluation.run_tests(box, row, TEST_TIMEOUT)
    if log is None:
        raise ConfigError(f"{row['instance_id']}: the tests take longer than {TEST_TIMEOUT:g} s")
    found = await asyncio.to_thread(grading.statuses, row, log)
    if found is None and patch:
        raise ConfigError(f"{row['instance_id']}: the tests do not run with the change either: {log[-2000:]}")
    return found or {}


def _written(row: Mapping[str, Any]) -> Instance:
    """Put a task into the task repository, in the official format."""
    tasks = store.folder() / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    texts = {
        "patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh",
        "problem_statement": "problem_statement.md",
    }  # fmt: skip
    tests = ("FAIL_TO_PASS", "PASS_TO_PASS")
    short = {key: value for key, value in row.items() if key not in (*texts, *tests, "hints_text")}
    target = tasks / row["instance_id"]
    filling = Path(tempfile.mkdtemp(prefix=".task-", dir=tasks))
    try:
        (filling / "task.yaml").write_text(yaml.safe_dump({**short, "split": "test"}, sort_keys=True))
        (filling / "tests.json").write_text(json.dumps({key: row[key] for key in tests}, indent=2) + "\n")
        for key, name in texts.items():
            (filling / name).write_text(row[key], newline="")
        shutil.rmtree(target, ignore_errors=True)
        filling.rename(target)
        target.chmod(0o755)
    finally:
        shutil.rmtree(filling, ignore_errors=True)
    return next(task for task in load(store.folder()) if task.id == row["instance_id"])
