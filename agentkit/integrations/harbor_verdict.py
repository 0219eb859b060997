"""Run the tests of a Harbor task and read their verdict.

Invariant: the tests run in a new container with the policy's files, in which no process of the policy runs. Nothing
that the policy left at the paths of tests and rewards is there: they are removed, and the tests written, after the last
command of the policy. If the tests give no verdict, the same tests on the untouched task decide about the cause: the
policy cannot void its episode, and a broken task never counts against the policy.
"""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from agentkit.errors import (
    CommandNotFound,
    DiskFull,
    EnvContractError,
    FileTooLarge,
    PathError,
    ResourcesExhausted,
    SandboxError,
    StartTimeout,
)
from agentkit.integrations.harbor_tasks import Task
from agentkit.sandboxes.attribution import Cause, decide
from agentkit.sandboxes.sandbox import Sandbox

LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_TESTS, _VERDICTS = "/tests", "/logs/verifier"
_OUTPUT = f"{_VERDICTS}/test-stdout.txt"
_LIMIT = 1 << 20
"""Bytes of the largest file with rewards."""
_STATE = (CommandNotFound, DiskFull, FileTooLarge, PathError, ResourcesExhausted)
"""Errors that the files in the sandbox cause: the sandbox works."""


@dataclass(frozen=True)
class Verdict:
    """The result of the tests."""

    reward: float
    rewards: Mapping[str, float]
    """All rewards by name."""
    output: str = ""
    """The end of the output of the tests."""
    error: str | None = None
    """Why there is no verdict of the tests, if the policy is the cause."""


@dataclass(frozen=True)
class NoVerdict:
    """The tests gave no verdict."""

    reason: str


Outcome = Verdict | NoVerdict


def settle(task: str, found: NoVerdict, untouched: Outcome) -> Verdict:
    """Return the verdict of an episode whose tests gave none.

    Args:
        task: the name of the task.
        found: why the tests gave no verdict on the policy's files.
        untouched: what the same tests give on the files that the task starts with.

    Returns:
        The failure of the policy, whose changes are the cause: reward 0, or that of the untouched task if it is lower.

    Raises:
        EnvContractError: the tests give no verdict on the untouched task either, so the task is broken.
    """
    if isinstance(untouched, NoVerdict):
        raise EnvContractError(
            f"the task {task} is broken: its tests give no verdict ({found.reason}), and none on the untouched task "
            f"either ({untouched.reason}); repair its tests, raise [verifier] timeout_sec, or leave the task out with "
            "the argument names"
        )
    return Verdict(min(0.0, untouched.reward), {}, error=found.reason)


def cause_of_files(error: SandboxError) -> Cause:
    """Attribute the failure to save the policy's files, or to start a sandbox with them."""
    return "program" if isinstance(error, (*_STATE, StartTimeout)) else decide(error, {})


async def run_tests(box: Sandbox, task: Task, cwd: str, env: Mapping[str, str], name: str) -> Outcome:
    """Run the tests of a task in ``box``, which no program has used before.

    Args:
        box: a sandbox whose user is root.
        task: the task.
        cwd: working directory of the tests.
        env: variables of the tests.
        name: the reward to return if there are several.

    Raises:
        SandboxError: the sandbox failed.
    """
    timeout = task.config.verifier.timeout_sec
    try:
        await _prepare(box, task, cwd)
        done = await box.exec(f"({_TESTS}/test.sh) >{_OUTPUT} 2>&1", cwd=cwd, env=env, timeout=timeout)
        if done.timed_out:
            return NoVerdict(f"they did not end in {timeout:g} s ([verifier] timeout_sec)")
        output = await _tail(box)
        try:
            rewards = await _rewards(box)
            return Verdict(chosen(rewards, name), rewards, output)
        except ValueError as problem:
            return NoVerdict(f"{problem}; they wrote {output!r}")
    except _STATE as error:
        return NoVerdict(f"they could not be run: {error}")


async def _prepare(box: Sandbox, task: Task, cwd: str) -> None:
    """Remove what lies at the paths of tests and rewards, make folders that are missing, and write the tests."""
    for path in ("/logs", *LOGS):
        found = await box.files.stat(path)
        if found is not None and (found.kind != "directory" or path == _VERDICTS):
            await box.files.remove(path)
    await box.files.remove(_TESTS)
    for path in (*LOGS, _TESTS, cwd):
        await box.files.mkdir(path)
    for path, file in task.files("tests").items():
        mode = file.stat().st_mode & 0o777 | (0o111 if path == "test.sh" else 0)
        await box.files.write(posixpath.join(_TESTS, path), file.read_bytes(), mode=mode)


async def _rewards(box: Sandbox) -> dict[str, float]:
    """Return the rewards that the tests wrote: ``reward.json`` comes first. Raises ``ValueError``."""
    for file, parse in (("reward.json", parse_json), ("reward.txt", parse_text)):
        path = posixpath.join(_VERDICTS, file)
        if await box.files.exists(path):
            try:
                return parse((await box.files.read(path, limit=_LIMIT)).decode())
            except (PathError, FileTooLarge) as error:
                raise ValueError(str(error)) from None
            except UnicodeDecodeError:
                raise ValueError(f"{path} is not text") from None
    raise ValueError(f"there is neither reward.txt nor reward.json in {_VERDICTS}")


async def _tail(box: Sandbox) -> str:
    """Return the end of the output of the tests; empty if it cannot be read."""
    with contextlib.suppress(PathError, FileTooLarge, UnicodeDecodeError):
        return (await box.files.read_text(_OUTPUT))[-2000:]
    return ""


def parse_text(text: str) -> dict[str, float]:
    """Return the reward of a ``reward.txt``. Raises ``ValueError`` if it is not one finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the reward {text.strip()[:100]!r} is not finite")
    return {"reward": value}


def parse_json(text: str) -> dict[str, float]:
    """Return the rewards of a ``reward.json`` by name. Raises ``ValueError`` if one is not a finite number."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("reward.json is nested too deeply") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"reward.json holds {text.strip()[:100]!r}, not rewards by name")
    rewards: dict[str, float] = {}
    for name, value in found.items():
        if not isinstance(value, int | float):
            raise ValueError(f"the reward {name!r} is {str(value)[:100]!r}, not a number")
        try:
            rewards[name] = float(value)
        except OverflowError:
            rewards[name] = math.inf
        if not math.isfinite(rewards[name]):
            raise ValueError(f"the reward {name!r} is not finite")
    return rewards


def chosen(rewards: Mapping[str, float], name: str) -> float:
    """Return the reward ``name``, or the only one. Raises ``ValueError`` if there are others."""
    if name in rewards:
        return rewards[name]
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    raise ValueError(f"there is no reward {name!r} among {sorted(rewards)}; choose one with the argument reward")
