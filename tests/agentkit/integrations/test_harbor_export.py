"""CodeContest-v0 as task directories of Harbor: what is written, and how programs are judged in a container."""

from __future__ import annotations

import asyncio
import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
from requiring import require

import agentkit
from agentkit.envs.code_contest import CodeContest, judge
from agentkit.errors import ConfigError
from agentkit.integrations import harbor_tasks
from agentkit.integrations.harbor import HarborTasks
from agentkit.integrations.harbor_export import PROGRAM, export
from agentkit.sandboxes.images import build

require("docker", "pip install 'agentkit-rl[harbor]'")

SEEDS = 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    assert len(export("CodeContest-v0", folder, SEEDS, seed=3, kwargs={"time_limit": 1})) == SEEDS
    return folder


def test_a_task_has_the_statement_the_tests_and_the_solution_of_its_seed(exported: Path) -> None:
    tasks = {task.id: task for task in harbor_tasks.load(exported)}
    assert set(tasks) == {f"agentkit/code-contest-{seed}" for seed in range(3, 3 + SEEDS)}
    env = CodeContest(time_limit=1)
    for seed in range(3, 3 + SEEDS):
        statement, _ = asyncio.run(env.reset(seed=seed))
        task = tasks[f"agentkit/code-contest-{seed}"]
        assert task.instruction.startswith(statement)
        assert PROGRAM in task.instruction
        assert env.task is not None
        assert env.task.solution is not None
        assert env.task.solution.strip() in (task.folder / "solution" / "solve.sh").read_text(encoding="utf-8")
        assert set(task.files("tests")) == {"test.sh", "judge.py", "cases.json"}


def test_equal_seeds_give_equal_directories(exported: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "agentkit",
        "env",
        "export",
        "CodeContest-v0",
        str(tmp_path / "again"),
        "time_limit=1",
    ]
    done = subprocess.run([*command, "--seed=3", f"--count={SEEDS}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"wrote {SEEDS} tasks" in done.stdout
    names = [path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()]
    same, _, _ = filecmp.cmpfiles(exported, tmp_path / "again", names, shallow=False)
    assert same == names


def test_what_cannot_be_exported_is_an_error(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        export("CodeContest-v0", exported, 1, seed=3, kwargs={})
    with pytest.raises(ConfigError, match=r"Sokoban-v0 cannot be exported to Harbor; CodeContest-v0 can"):
        export("Sokoban-v0", tmp_path, 1, kwargs={})


def test_a_program_is_a_file_of_limited_size(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    assert judge.program_of(str(program)) is None
    program.write_bytes(b"")
    assert judge.program_of(str(program)) is None
    program.write_bytes(b"x" * judge.SOURCE_LIMIT)
    assert judge.program_of(str(program)) == b"x" * judge.SOURCE_LIMIT
    (tmp_path / "link").symlink_to(program)
    assert judge.program_of(str(tmp_path / "link")) is None
    program.write_bytes(b"x" * (judge.SOURCE_LIMIT + 1))
    assert judge.program_of(str(program)) is None
    assert judge.program_of(str(tmp_path)) is None


CHEATS = {
    "reads the cases": "import json,sys\ncases=json.load(open('/tests/cases.json'))\n"
    "print(dict(cases['cases'])[sys.stdin.read()])",
    "writes the reward": "open('/logs/verifier/reward.json','w').write('{\"reward\":1}')",
    "writes it later": "import os,time\nif os.fork()==0:\n    os.setsid()\n    while True:\n"
    "        try: open('/logs/verifier/reward.json','w').write('{\"reward\":1}')\n        except OSError: pass\n",
    "changes the judge": "open('/tests/judge.py','w').write('')",
    "never ends": "while True: pass",
    "starts processes without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "sleeps": "import time; time.sleep(1000)",
    "eats memory": "x = bytearray(10**10)",
    "writes without end": "while True: print('x' * 10000)",
    "fails": "raise SystemExit(1)",
}


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_solutions_pass_and_cheats_do_not(exported: Path) -> None:
    require(build.exists("agentkit/base"), "run `PYTHON=.venv/bin/python .ci/docker`")
    env: HarborTasks = agentkit.make(f"harbor:{exported}")
    try:
        for task in env.tasks:
            await env.reset(seed=0, options={"task": task.id})
            told = [await env.step(action) for action in env.expert()]
            assert told[-1][1] == 1.0, told
        first = env.tasks[0].id
        for cheat, program in CHEATS.items():
            await env.reset(seed=0, options={"task": first})
            await env.step(f"create {PROGRAM}\n{program}")
            assert (await env.step("submit"))[1:3] == (0.0, True), cheat
        await env.reset(seed=0, options={"task": first})
        text = (await env.step("bash id -u; touch /usr/bin/python3 /tests/x; ls /tests /logs"))[0]
        assert text.startswith("65534\n")
        assert "Permission denied" in text
        assert (await env.step("submit"))[1:3] == (0.0, True)
    finally:
        await env.close()
