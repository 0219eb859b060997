"""Whether a test log says that an instance is resolved, as the official evaluation decides it.

Invariant: every decision is the ``swebench`` package's own: its test specification and evaluation script, its parsers,
its cross-check of the exit code, its rules for FAIL_TO_PASS and PASS_TO_PASS. Nothing here runs anything. One thing is
stricter: nothing of a patch's text reaches the log that is read, where it could stand for results.
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
"""Commands of an evaluation script that print what the agent wrote, for people who read logs. The official readers take
the first marks that they find, and a carriage return for the end of a line: in a change log alone an agent could write
down that all tests passed."""


@dataclass(frozen=True)
class Report:
    """What the tests said."""

    resolved: bool
    graded: bool
    """The log holds results: the tests ran to their end, and their exit code agrees with what they printed."""
    fixed: int = 0
    """FAIL_TO_PASS tests that pass."""
    to_fix: int = 0
    """FAIL_TO_PASS tests."""
    broken: int = 0
    """PASS_TO_PASS tests that do not pass any more."""
    suspicion: str | None = None
    """A sign of a broken machine rather than a wrong patch; advisory, as in the official report."""


@functools.cache
def official() -> SimpleNamespace:
    """The parts of ``swebench`` that are used. Takes seconds the first time. Raises ``ConfigError`` without it."""
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
    """The commands that are tried, in order, to apply a patch; a file's name follows each."""
    return official().apply_commands


def eval_script(row: Mapping[str, Any]) -> str:
    """The script that runs an instance's tests and prints between marks what the parsers read; it shows no patch."""
    return _SHOWS_THE_PATCH.sub(":", official().test_spec(dict(row)).eval_script)


def statuses(row: Mapping[str, Any], log: str) -> dict[str, str] | None:
    """Test → PASSED, FAILED, ERROR, SKIPPED or XFAIL; None if the log is not one of tests that ran to their end."""
    found, valid = _on_file(log, lambda path: official().statuses(official().test_spec(dict(row)), path))
    return found if valid else None


def report(row: Mapping[str, Any], patch: str, log: str) -> Report:
    """Grade the log of the evaluation script, run after ``patch`` was applied."""
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
    # The official functions read a log by its path, in the locale's encoding.
    with tempfile.TemporaryDirectory(prefix="agentkit-swe-") as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(log, errors="replace")
        return work(path)
