"""Build a task from two consecutive releases: the change of the sources is the solution, the changed tests decide.

Invariant: a task is written only if, in three runs each, its FAIL_TO_PASS tests fail before the solution and pass after
it, and its PASS_TO_PASS tests always pass. Tests that the official parser cannot distinguish are in neither list.
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

from agentkit.envs.swebench import evaluation, grading, sandbox_pools
from agentkit.envs.swebench.instance import Instance, load
from agentkit.envs.swebench.releases import locations, package_index, source_trees, task_image
from agentkit.envs.swebench.releases.source_trees import Tree
from agentkit.errors import ConfigError
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import Resources

RUNS = 3
TEST_TIMEOUT = 600.0
NOBODY = "65534:65534"
PYTEST = ("pytest==7.4.4", "pluggy==1.5.0", "iniconfig==2.0.0", "packaging==24.2")
"""The interpreter that runs the tests; old tests break under newer versions."""
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
"""Files at the top of a repository that configure pytest; the tests' versions are used, not the agent's."""
_PYTEST = """\
import os, sys, pytest
roots = os.environ["PYTHONPATH"] = sys.argv.pop(1)
class Repository:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):
        sys.path[:0] = [os.getcwd(), *roots.split(":")]
sys.exit(pytest.main(plugins=[Repository()]))
"""
"""Run pytest, with the repository on the path only after pytest and its plugins, so that a `sitecustomize`, a
`pytest.py` or package metadata in the repository cannot replace them."""
_PARSER = "parse_log_pytest"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Pair:
    """Two consecutive releases of a package."""

    package: str
    old: str
    new: str
    packages: tuple[str, ...] = ()
    """Requirements of the package and its tests besides pytest, in pip's syntax."""
    sha256: tuple[str, str] | None = None
    """Checksums of the two source archives; None trusts the index."""
    statement: str | None = None
    """The issue, if the change log does not describe it."""

    @property
    def id(self) -> str:
        name = package_index.normal(self.package)
        return f"{name}__{name}-{self.new}".lower()


@dataclass(frozen=True)
class Change:
    """The difference between the two releases."""

    patch: str
    test_patch: str
    modules: tuple[str, ...]
    """Test modules that the test patch changes or adds."""
    statement: str


async def build(pair: Pair, progress: Progress = lambda _: None) -> Instance:
    """Build the task of a pair and its image; existing parts are rebuilt only if they changed.

    Raises:
        ConfigError: these releases give no task.
        SandboxError: a sandbox or an image failed.
    """
    digests = pair.sha256 or (None, None)
    archives = [
        await asyncio.to_thread(package_index.fetch, pair.package, version, locations.sources(), digest)
        for version, digest in zip((pair.old, pair.new), digests, strict=True)
    ]
    old, new = (source_trees.read(archive) for archive in archives)
    change = difference(pair, old, new)
    progress("building the image")
    built = await task_image.build(await asyncio.to_thread(task_image.builder), old, pair.old)
    packages = (*PYTEST, *pair.packages)
    title = f"{pair.package} {pair.old}"
    image = await asyncio.to_thread(task_image.make, pair.id, title, old, built, packages)
    draft = _row(pair, change, image, await _commit(image), old)
    progress(f"running the tests, {RUNS} times before and after")
    before, after = await _runs(draft)
    fail_to_pass, pass_to_pass = sorted_out(before, after, grading.official().passed)
    if not fail_to_pass:
        raise ConfigError(f"{pair.id}: no test fails before the change and passes after it, in all of {RUNS} runs")
    return await asyncio.to_thread(_written, {**draft, "FAIL_TO_PASS": fail_to_pass, "PASS_TO_PASS": pass_to_pass})


def difference(pair: Pair, old: Tree, new: Tree) -> Change:
    """Return the difference of two releases. Raises ``ConfigError`` if it lacks sources, tests or a description."""
    patch = source_trees.diff(old, new, lambda path: not source_trees.is_test(path))
    test_patch = source_trees.diff(old, new, source_trees.is_test)
    modules = tuple(
        path for path in source_trees.changed(old, new) if source_trees.is_test_module(path) and path in new
    )
    if not patch or not modules:
        raise ConfigError(
            f"{pair.package} {pair.old} to {pair.new} gives no task: its source archives differ in no "
            f"{'test module' if patch else 'source file'}"
        )
    said = pair.statement or source_trees.statement(old, new)
    if said is None:
        raise ConfigError(f"{pair.package} {pair.new} holds no change log that says what changed; give a statement")
    statement = (
        f"The next release of {pair.package} after {pair.old} makes the following changes. Implement them.\n\n"
        f"{said.strip()}\n"
    )
    return Change(patch, test_patch, modules, statement)


def eval_script(commit: str, old: Tree, change: Change) -> str:
    """Return the evaluation script, in the official form.

    Before the test patch is applied, it restores everything that belongs to the tests: folders of tests with all their
    files, changed test modules elsewhere, and the configuration of pytest at the top of the repository.
    """
    folders = source_trees.test_folders(old)
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
    name = package_index.normal(pair.package)
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
    async with Sandbox.create(image=image, user=NOBODY, readonly_root=False, pull="never") as box:
        return (await box.exec("git rev-parse HEAD", cwd=evaluation.REPOSITORY, check=True)).stdout.strip()


async def _runs(row: Mapping[str, Any]) -> tuple[list[Mapping[str, str]], list[Mapping[str, str]]]:
    before = [await _statuses(row, "") for _ in range(RUNS)]
    after = [await _statuses(row, row["patch"]) for _ in range(RUNS)]
    return before, after


async def _statuses(row: Mapping[str, Any], patch: str) -> Mapping[str, str]:
    async with Sandbox.create(sandbox_pools.spec_of(Instance(row), Resources())) as box:
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
    tasks = locations.folder() / "tasks"
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
    return next(task for task in load(locations.folder()) if task.id == row["instance_id"])
