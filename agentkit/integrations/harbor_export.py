"""Write tasks of agentkit as task directories of Harbor 0.25, which other trainers read.

Invariant: an exported task has the same tests and the same rewards as here. Its agent is a user without rights, who can
neither read the tests nor change what judges it.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentkit.envs.code_contest.env import CodeContest
from agentkit.errors import ConfigError
from agentkit.sandboxes.spec import DEFAULT_IMAGE

EXPORTED = "CodeContest-v0"
PROGRAM = "/app/solution.py"
_DOCKERFILE = """\
FROM {base}
USER root
RUN mkdir -p /app && chown 65534:65534 /app
WORKDIR /app
"""
_CONFIG = """\
schema_version = "1.4"

[task]
name = "agentkit/{name}"
description = "A programming task of CodeContest-v0 of agentkit."

[agent]
timeout_sec = 900.0
user = "65534"

[verifier]
timeout_sec = {timeout:.1f}
user = "root"

[environment]
network_mode = "no-network"
cpus = 1
memory_mb = {memory}
"""
_INSTRUCTION = """\
{statement}

Write a Python 3 program that solves the task to `{program}`. It reads standard input, writes standard output, has the
standard library alone, and is judged on hidden inputs. One run may take {seconds} s of processor time.
"""
_TEST = f"""\
#!/bin/bash
exec python3 -I /tests/judge.py {PROGRAM} /tests/cases.json /logs/verifier/reward.txt
"""


def export(
    id: str, folder: Path, count: int, *, seed: int = 0, base: str = DEFAULT_IMAGE, kwargs: Mapping[str, Any]
) -> list[Path]:
    """Write the tasks of the seeds from ``seed`` on, each in a new directory, and return the directories.

    Args:
        id: the environment; ``"CodeContest-v0"``.
        folder: where the directories are made.
        count: number of seeds.
        seed: the first one.
        base: image that the tasks' Dockerfiles start from; it needs Python 3.9 and bash.
        kwargs: arguments of the environment.

    Raises:
        ConfigError: the environment cannot be exported, or a directory exists.
    """
    if id != EXPORTED:
        raise ConfigError(f"{id} cannot be exported to Harbor; {EXPORTED} can")
    return asyncio.run(_export(folder, range(seed, seed + count), base, kwargs))


async def _export(folder: Path, seeds: range, base: str, kwargs: Mapping[str, Any]) -> list[Path]:
    env = CodeContest(**kwargs)
    written: list[Path] = []
    try:
        for seed in seeds:
            statement, _ = await env.reset(seed=seed)
            written.append(_write(env, f"code-contest-{seed}", statement, folder, base))
    finally:
        await env.close()
    return written


def _write(env: CodeContest, name: str, statement: str, folder: Path, base: str) -> Path:
    """Write the task of the current episode, and return its directory. Raises ``ConfigError`` if it exists."""
    task, limits, home = env.task, env.limits, folder / name
    assert task is not None
    if home.exists():
        raise ConfigError(f"{home} exists; choose another folder, or remove it")
    cases = {
        "cases": [[case.input, case.output] for case in task.tests],
        "compare": task.compare,
        "tolerance": task.tolerance,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "partial": env.partial_credit,
    }
    timeout = 60.0 + len(task.tests) * (9 * limits.seconds + 1)
    memory = 512 + (2 * limits.memory >> 20)
    files = {
        "task.toml": _CONFIG.format(name=name, timeout=timeout, memory=memory),
        "instruction.md": _INSTRUCTION.format(statement=statement, program=PROGRAM, seconds=limits.seconds),
        "environment/Dockerfile": _DOCKERFILE.format(base=base),
        "tests/test.sh": _TEST,
        "tests/judge.py": importlib.resources.files("agentkit.envs.code_contest").joinpath("judge.py").read_text(),
        "tests/cases.json": json.dumps(cases),
    }
    if task.solution is not None:
        mark = "END_OF_PROGRAM"
        while mark in task.solution:
            mark += "_"
        files["solution/solve.sh"] = f"#!/bin/bash\ncat >{PROGRAM} <<'{mark}'\n{task.solution.strip()}\n{mark}\n"
    for path, text in files.items():
        target = home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        if path.endswith(".sh"):
            target.chmod(0o755)
    return home
