"""Grade a test log as the official evaluation does.

Invariant: all decisions are made by the ``swebench`` package: test specification, evaluation script, parsers, check of
the exit code, and the rules for FAIL_TO_PASS and PASS_TO_PASS. Nothing is executed here. One rule is stricter: no text
of a patch reaches the log, where it could imitate results.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentkit.envs.swebench.instance import EXTRA
from agentkit.errors import ConfigError

_SHOWS_THE_PATCH = re.compile(r"^git (status|show|(-c core\.fileMode=false )?diff( .*)?)$", re.MULTILINE)
"""Commands of an evaluation script that print text of the agent, for readers of logs. The official parsers use the
first marks that they find and treat a carriage return as a line end, so an agent could otherwise write that all tests
passed into a change log."""


@dataclass(frozen=True)
class Report:
    """The result of the tests."""

    resolved: bool
    graded: bool
    """Whether the log is complete: the tests ran to the end, and their exit code agrees with their output."""
    fixed: int = 0
    """Number of FAIL_TO_PASS tests that pass."""
    to_fix: int = 0
    """Number of FAIL_TO_PASS tests."""
    broken: int = 0
    """PASS_TO_PASS tests that no longer pass."""
    suspicion: str | None = None
    """A sign of a broken machine instead of a wrong patch; advisory, as in the official report."""


@functools.cache
def official() -> SimpleNamespace:
    """Return the parts of ``swebench`` that are used; slow at first. Raises ``ConfigError`` without it."""
    try:
        from swebench.harness import grading, utils
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.harness.run_evaluation import GIT_APPLY_CMDS
    except ImportError as error:
        raise ConfigError(
            f"SWE-bench is graded by the swebench package (5 or newer), which is missing: {EXTRA}"
        ) from error
    return SimpleNamespace(
        test_spec=utils.make_test_spec,
        report=grading.get_eval_report,
        statuses=grading.get_logs_eval,
        passed=grading.test_passed,
        parsers=PARSER_REGISTRY,
        apply_commands=tuple(GIT_APPLY_CMDS),
    )


def apply_commands() -> tuple[str, ...]:
    """Return the commands that are tried, in order, to apply a patch; a file name follows each."""
    return official().apply_commands


def eval_script(row: Mapping[str, Any]) -> str:
    """Return the script that runs an instance's tests and prints marks for the parsers; it does not print the patch."""
    return _SHOWS_THE_PATCH.sub(":", official().test_spec(dict(row)).eval_script)


def statuses(row: Mapping[str, Any], log: str) -> dict[str, str] | None:
    """Return the status of each test (PASSED, FAILED, ERROR, SKIPPED or XFAIL); None if they did not run to the end."""
    found, valid = _on_file(log, lambda path: official().statuses(official().test_spec(dict(row)), path))
    return found if valid else None


def report(row: Mapping[str, Any], patch: str, log: str) -> Report:
    """Grade the log of the evaluation script after ``patch`` was applied."""
    name = row["instance_id"]
    prediction = {"instance_id": name, "model_patch": patch, "model_name_or_path": "agentkit"}
    spec = official().test_spec(dict(row))
    result = _on_file(log, lambda path: official().report(spec, prediction, path, include_tests_status=True)[name])
    tests = result.get("tests_status")
    if tests is None:
        return Report(False, False, suspicion=result.get("infra_failure_reason"))
    fixed, missing = (len(tests["FAIL_TO_PASS"][kind]) for kind in ("success", "failure"))
    return Report(result["resolved"], True, fixed, fixed + missing, len(tests["PASS_TO_PASS"]["failure"]))


def _on_file(log: str, work: Any) -> Any:
    # The official functions read a log from a file, in the encoding of the locale.
    with tempfile.TemporaryDirectory(prefix="agentkit-swe-") as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, errors="replace")
        return work(path)
