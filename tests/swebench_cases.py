"""Shared data of the SWE-bench tests: written rows, logs in pytest's format, official data, and built tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from official import official
from requiring import require

from agentkit.envs.swebench.instance import Instance
from agentkit.envs.swebench.releases import build_task, task_image
from agentkit.envs.swebench.releases.release_list import SHIPPED
from agentkit.errors import EngineUnavailable
from agentkit.sandboxes.images import build as images

REMEDY = "pip install 'agentkit-rl[swe]'"
DOCKER = "run `PYTHON=.venv/bin/python .ci/docker`: it starts an engine and makes the images that tasks are built on"


def lite_dev() -> Path:
    """The official file of SWE-bench Lite's development set."""
    return next(official("swebench-lite-dev").glob("*dev.parquet"))


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
    """Return the output of the evaluation script; ``a="PASSED"`` is test ``t.py::a``."""
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


def built(*names: str) -> dict[str, Instance]:
    """Some of the shipped pairs, built into ``AGENTKIT_DATA``; the archives come from the package index."""
    for module in ("docker", "swebench", "pyarrow"):
        require(module, REMEDY)
    try:
        require(images.exists(task_image.DEBIAN) or images.exists(task_image.BASE), DOCKER)
    except EngineUnavailable as error:
        require(False, f"{DOCKER} ({error})")

    async def main() -> list[Instance]:
        return [await build_task.build(pair) for pair in SHIPPED if pair.id in names]

    return {task.id: task for task in asyncio.run(main())}


def gold(task: Instance) -> str:
    """Return the solution as an action."""
    return f"bash git apply - <<'END_OF_GOLD'\n{task.patch}END_OF_GOLD"
