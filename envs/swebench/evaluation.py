"""Run the official evaluation of a patch in a fresh sandbox.

Invariant: commands, script and grading belong to the host and the ``swebench`` package; the sandbox only runs the
tests. A patch is not resolved if it does not apply, breaks the tests, never ends, uses up the memory, or if two
sandboxes fail with it without a recorded external cause. Other failures of a sandbox are ``SandboxError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

from agentkit.envs.swebench import grading
from agentkit.envs.swebench.grading import Report
from agentkit.errors import SandboxError, SandboxLost
from agentkit.sandboxes.attribution import cause_of
from agentkit.sandboxes.sandbox import Sandbox

REPOSITORY = "/testbed"
ENVIRONMENT = {"TZ": "UTC", "PYTHONHASHSEED": "0", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""Environment variables of all programs in a sandbox of an instance. Tests that depend on the first two would pass by
chance. Official scripts reinstall the repository: without a network pip must use the installed build backend (it reads
the last variable as "no isolation: yes")."""
LOG_LIMIT = 32 << 20
_PATCH, _SCRIPT = "/tmp/patch.diff", "/tmp/eval.sh"
_APPLY_TIMEOUT = 120.0
_ATTEMPTS = 3
"""Sandboxes that are tried if the engine, or a request to it, ends them."""

Outcome = Literal[
    "resolved",
    "unresolved",
    "no patch",
    "patch too large",
    "patch does not apply",
    "timeout",
    "no results",
    "out of memory",
    "sandbox failed",
]


@dataclass(frozen=True)
class Verdict:
    """The result of an evaluation."""

    outcome: Outcome
    report: Report | None = None
    log: str = ""
    """Output of the evaluation."""

    @property
    def resolved(self) -> bool:
        return self.outcome == "resolved"


async def evaluate(box: Sandbox, row: Mapping[str, Any], patch: bytes, timeout: float) -> Verdict:
    """Apply ``patch`` in a fresh sandbox of the instance and run its tests, for at most ``timeout`` seconds.

    A patch is bytes, because the changed files may have any encoding.

    Raises:
        SandboxError: the sandbox failed.
    """
    if not patch.strip():
        return Verdict("no patch")
    if not await apply(box, patch):
        return Verdict("patch does not apply")
    log = await run_tests(box, row, timeout)
    if log is None:
        return Verdict("timeout")
    report = await asyncio.to_thread(grading.report, row, patch.decode("utf-8", "replace"), log)
    outcome: Outcome = "resolved" if report.resolved else "unresolved" if report.graded else "no results"
    return Verdict(outcome, report, log)


async def evaluate_twice(
    fresh: Callable[[], AbstractAsyncContextManager[Sandbox]], row: Mapping[str, Any], patch: bytes, timeout: float
) -> Verdict:
    """Run ``evaluate`` in a sandbox of ``fresh``, and in another one if the first fails.

    Raises:
        SandboxError: no sandbox can be created, or several failed for external causes.
    """
    external = unexplained = 0
    while True:
        async with fresh() as box:
            try:
                return await evaluate(box, row, patch, timeout)
            except SandboxError as error:
                cause = await cause_of(error, box)
                if cause == "external":
                    external += 1
                    if external == _ATTEMPTS:
                        raise
                elif cause == "program":
                    return Verdict("out of memory" if error.details.get("reason") == "oom" else "sandbox failed")
                else:
                    unexplained += 1
                    if unexplained == 2:
                        return Verdict("sandbox failed")


async def run_tests(box: Sandbox, row: Mapping[str, Any], timeout: float) -> str | None:
    """Return the output of the evaluation script in this sandbox; None if it exceeds the time limit."""
    await box.files.write(_SCRIPT, await asyncio.to_thread(grading.eval_script, row))
    command = f"exec /bin/bash {_SCRIPT} 2>&1"
    result = await box.exec(command, cwd=REPOSITORY, env=ENVIRONMENT, timeout=timeout, output_limit=LOG_LIMIT)
    if result.oom_killed:
        raise SandboxLost("the tests ran out of memory; give the sandbox more (resources)", reason="oom")
    return None if result.timed_out else result.stdout


async def apply(box: Sandbox, patch: bytes) -> bool:
    """Return whether one of the official commands applied ``patch``."""
    await box.files.write(_PATCH, patch)
    for attempt, command in enumerate(await asyncio.to_thread(grading.apply_commands)):
        if attempt:  # a failed attempt may leave parts of the patch behind
            await box.exec("git checkout -- . ; git clean -fd", cwd=REPOSITORY, timeout=_APPLY_TIMEOUT)
        if (await box.exec(f"{command} {_PATCH}", cwd=REPOSITORY, timeout=_APPLY_TIMEOUT)).ok:
            return True
    reverse = f"git apply --check --reverse {_PATCH}"
    return (await box.exec(reverse, cwd=REPOSITORY, timeout=_APPLY_TIMEOUT)).ok
