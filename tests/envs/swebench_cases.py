"""What tests of SWE-bench share: a row by hand, logs as pytest writes them, and where the official data lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from requiring import require

LITE_DEV = Path(__file__).parents[3] / "shared" / "data" / "swebench" / "lite_dev.parquet"
REMEDY = "pip install 'agentkit-rl[swe]'"


def lite_dev() -> Path:
    require(LITE_DEV.is_file(), f"put SWE-bench Lite's development set at {LITE_DEV}")
    return LITE_DEV


def row(**columns: Any) -> dict[str, Any]:
    """An instance with two tests to fix and three to keep."""
    script = "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n"
    script += ": '>>>>> Start Test Output'\npytest -rA t.py\n: '>>>>> End Test Output'\ngit checkout HEAD t.py\n"
    return {
        "instance_id": "o__r-1",
        "repo": "o/r",
        "version": "1",
        "base_commit": "0" * 40,
        "problem_statement": "It is broken.",
        "patch": "diff --git a/x b/x\n",
        "test_patch": "",
        "FAIL_TO_PASS": ["t.py::a", "t.py::b"],
        "PASS_TO_PASS": ["t.py::c", "t.py::d", "t.py::e[x"],
        "image": "o/r:1",
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        **columns,
    }


def log(exit_code: int, **statuses: str) -> str:
    """What the evaluation script prints; ``a="PASSED"`` is test ``t.py::a``."""
    lines = [f"{status} t.py::{name}" for name, status in statuses.items()]
    return "\n".join(
        [
            "+ : '>>>>> Start Test Output'",
            "===== short test summary info =====",
            *lines,
            "+ SWEBENCH_TEST_EXIT_CODE=0",
            "+ : '>>>>> End Test Output'",
            f"+ echo '>>>>> Test Exit Code: {exit_code}'",
            f">>>>> Test Exit Code: {exit_code}",
        ]
    )
