"""Run the tests of a Harbor task and read their verdict.

Invariant: the tests run in a new container with the policy's files, in which no process of the policy runs. Nothing
that the policy left at the paths of tests and rewards is there: they are removed, and the tests written, after the last
command of the policy. Tests that leave no finite reward raise an ``EnvError``, never a reward.
"""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from agentkit.errors import CommandNotFound, EnvContractError, EnvTimeout, FileTooLarge, PathError
from agentkit.integrations.harbor_tasks import Task
from agentkit.sandboxes.sandbox import Sandbox

LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_TESTS, _VERDICTS = "/tests", "/logs/verifier"
_OUTPUT = f"{_VERDICTS}/test-stdout.txt"
_LIMIT = 1 << 20
"""Bytes of the largest file with rewards."""


@dataclass(frozen=True)
class Verdict:
    """The result of the tests."""

    reward: float
    rewards: Mapping[str, float]
    """All rewards by name."""
    output: str
    """The end of the output of the tests."""


async def run_tests(box: Sandbox, task: Task, cwd: str, env: Mapping[str, str], name: str) -> Verdict:
    """Run the tests of a task in ``box``, which has the policy's files, and which the policy never used.

    Args:
        box: a sandbox whose user is root.
        task: the task.
        cwd: working directory of the tests.
        env: variables of the tests.
        name: the reward to return if there are several.

    Raises:
        EnvContractError: there is no verdict.
        EnvTimeout: the tests did not end in time.
        SandboxError: the sandbox failed.
    """
    timeout = task.config.verifier.timeout_sec
    for path in ("/logs", *LOGS):
        found = await box.files.stat(path)
        if found is not None and (found.kind != "directory" or path == _VERDICTS):
            await box.files.remove(path)
    await box.files.remove(_TESTS)
    for path in (*LOGS, _TESTS):
        await box.files.mkdir(path)
    for path, file in task.files("tests").items():
        mode = file.stat().st_mode & 0o777 | (0o111 if path == "test.sh" else 0)
        await box.files.write(posixpath.join(_TESTS, path), file.read_bytes(), mode=mode)
    try:
        done = await box.exec(f"({_TESTS}/test.sh) >{_OUTPUT} 2>&1", cwd=cwd, env=env, timeout=timeout)
    except CommandNotFound as error:
        raise EnvContractError(f"the tests of {task.id} could not be started: {error}") from None
    if done.timed_out:
        raise EnvTimeout(f"the tests of {task.id} did not end in {timeout:g} s ([verifier] timeout_sec)")
    output = await _tail(box)
    try:
        rewards = await _rewards(box)
        return Verdict(chosen(rewards, name), rewards, output)
    except ValueError as problem:
        raise EnvContractError(f"the tests of {task.id} left no verdict: {problem}; they wrote {output!r}") from None


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
