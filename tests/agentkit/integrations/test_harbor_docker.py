"""Tasks of Harbor on a real engine: solutions, wrong answers, and agents that forge or prevent verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from harbor_cases import ANSWER, DOCKERFILE, SOLUTION, TEST, WRONG, write_task
from requiring import require

import agentkit
from agentkit.errors import EnvContractError, EnvCrashed, ImageError, SandboxError, UnexplainedCrash
from agentkit.integrations.harbor import HarborTasks
from agentkit.integrations.harbor_tasks import Task
from agentkit.integrations.harbor_verdict import Outcome
from agentkit.sandboxes import sandbox as sandbox_module
from agentkit.sandboxes.images import build
from agentkit.sandboxes.types import Snapshot

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]

Make = Callable[..., HarborTasks]
YES = "printf '#!/bin/bash\\necho 1 >/logs/verifier/reward.txt\\n'"


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Writes a task and makes its environment."""
    require("docker", "pip install 'agentkit-rl[harbor]'")
    try:
        there = build.exists("agentkit/base")
    except SandboxError:
        there = False
    require(there, "run `PYTHON=.venv/bin/python .ci/docker`: it installs and starts an engine")
    made: list[HarborTasks] = []

    def make_one(arguments: dict[str, Any] | None = None, **task: Any) -> HarborTasks:
        folder = write_task(tmp_path / f"task{len(made)}", **task)
        made.append(agentkit.make(f"harbor:{folder}", **(arguments or {})))
        return made[-1]

    yield make_one
    for env in made:
        await env.close()


async def play(env: HarborTasks, *actions: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Play these actions from the start; return the result of the last step."""
    await env.reset(seed=0)
    result: tuple[str, float, bool, bool, dict[str, Any]] = ("", 0.0, False, False, {})
    for action in actions:
        result = await env.step(action)
    return result


def docker(*words: str) -> str:
    """Run the command `docker`, and return its output."""
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


async def test_the_solution_a_right_and_a_wrong_answer(make: Make) -> None:
    env = make()
    text, info = await env.reset(seed=0)
    assert text == "Write the sum of the numbers in numbers.txt to sum.txt.\n"
    assert info == {"success": False, "action_valid": True, "task": "agentkit/task0"}
    told = [await env.step(action) for action in env.expert()]
    assert told[-1][1:4] == (1.0, True, False)
    assert told[-1][4]["success"]
    assert told[-1][4]["metrics"] == {"reward": 1.0}
    for answer, reward in ((ANSWER, 1.0), (WRONG, 0.0), ("view numbers.txt", 0.0)):
        assert (await play(env, answer, "submit"))[1:4] == (reward, True, False)
    _, reward, done, _, info = await play(env, "dance")
    assert (reward, done, info["action_valid"]) == (0.0, False, False)


async def test_work_in_all_places_reaches_the_tests_and_processes_do_not(make: Make) -> None:
    test = TEST.replace("if [ ", "[ -e /tmp/in-tmp ] || exit; pgrep -f 'sleep 1[0]00' && exit\nif [ ")
    writes = "bash touch /tmp/in-tmp; nohup setsid sleep 1000 >/dev/null 2>&1 &"
    assert (await play(make(test=test), writes, ANSWER, "submit"))[1] == 1.0


FORGED = {
    "rewards": "echo 1 >/logs/verifier/reward.txt; echo '{\"reward\": 1}' >/logs/verifier/reward.json",
    "a loop that writes rewards": (
        'nohup setsid sh -c \'while :; do mkdir -p /logs/verifier; echo {\\"reward\\":1} >/logs/verifier/reward.json; '
        "done' >/dev/null 2>&1 &"
    ),
    "tests": f"mkdir -p /tests; {YES} >/tests/test.sh; chmod 755 /tests/test.sh; mkdir /tests/more",
    "a link at the rewards": "rm -r /logs; mkdir /my; echo '{\"reward\":1}' >/my/reward.json; ln -s /my /logs",
    "a link below": "rm -r /logs/verifier; mkdir /my; echo '{\"reward\":1}' >/my/reward.json; ln -s /my /logs/verifier",
    "a link at the tests": f"mkdir /mine; {YES} >/mine/test.sh; chmod 755 /mine/test.sh; ln -s /mine /tests",
    "links of the files": "ln -s /mine /logs/verifier/reward.json; echo '{\"reward\":1}' >/mine; mkdir /tests",
    "read-only rewards": "cd /logs/verifier; echo '{\"reward\":1}' >reward.json; chmod 444 reward.json; chmod 555 .",
    "a file at the logs": "rm -r /logs; echo 1 >/logs; echo 1 >/tests",
}


@pytest.mark.parametrize("way", FORGED)
async def test_a_forged_verdict_is_not_read(make: Make, way: str) -> None:
    env = make()
    assert (await play(env, f"bash {FORGED[way]}", "submit"))[1] == 0.0
    assert (await play(env, f"bash {FORGED[way]}", "bash cd /app", ANSWER, "submit"))[1] == 1.0


BROKEN = {
    "nothing": "exit 0",
    "an empty file": ">/logs/verifier/reward.txt",
    "not a number": "echo good >/logs/verifier/reward.txt",
    "nan": "echo nan >/logs/verifier/reward.txt",
    "infinity": "echo '{\"reward\": 1e999}' >/logs/verifier/reward.json",
    "a bad object beside a good text": "echo '{}' >/logs/verifier/reward.json; echo 1 >/logs/verifier/reward.txt",
    "a folder": "mkdir /logs/verifier/reward.txt",
    "bytes": r"printf '\xff\xfe' >/logs/verifier/reward.txt",
    "a large file": "head -c 3000000 /dev/zero >/logs/verifier/reward.txt",
    "no end": "sleep 100",
}


@pytest.mark.parametrize("way", BROKEN)
async def test_a_broken_task_voids_the_episode(make: Make, way: str) -> None:
    env = make(test=f"#!/bin/bash\n{BROKEN[way]}\n")
    env.tasks[0].config.verifier.timeout_sec = 3.0
    with pytest.raises(EnvContractError, match="the task agentkit/task0 is broken"):
        await play(env, ANSWER, "submit")


async def test_the_message_of_a_broken_task_has_the_output_of_its_tests_and_the_remedy(make: Make) -> None:
    with pytest.raises(EnvContractError, match=r"no such module.*no such module.*repair its tests"):
        await play(make(test="#!/bin/bash\necho no such module >&2\n"), "submit")


NEEDS_TMP = TEST.replace("if [ ", "head -c 1000000 /dev/zero >/tmp/scratch || exit 1\nif [ ")
DESTROYED = {
    "bash": ("rm /bin/bash", "neither reward.txt nor reward.json"),
    "the shell": ("rm /bin/sh", "could not be run"),
    "everything": ("rm -rf /bin /usr /lib /lib64 /sbin", "could not be run|no sandbox for them starts"),
    "a sparse file": ("truncate -s 100G /tmp/file", "cannot be saved"),
    "a full /tmp": ("cat /dev/zero >/tmp/zeros", "neither reward.txt nor reward.json"),
    "a program that never ends": ("printf '#!/bin/sh\\nsleep 1000' >/usr/bin/paste", "did not end in 5 s"),
    "a program that kills all": ("printf '#!/bin/sh\\nkill -9 -1' >/usr/bin/paste", "neither reward.txt nor"),
    "a program that needs all memory": (
        "printf '#!/bin/sh\\nexec tail -c 4000000000 /dev/zero' >/usr/bin/paste; rm /usr/bin/python3*",
        "",
    ),
}


@pytest.mark.parametrize("way", DESTROYED)
async def test_an_agent_that_destroys_what_the_tests_need_has_failed(make: Make, way: str) -> None:
    command, reason = DESTROYED[way]
    env = make({"resources": {"memory": "160m"}}, test=NEEDS_TMP)
    env.tasks[0].config.verifier.timeout_sec = 5.0
    _, reward, terminated, truncated, info = await play(env, ANSWER, f"bash {command}", "submit")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    if reason:
        assert re.search(reason, info["verdict_error"])


async def test_files_that_cannot_be_saved_in_time_do_not_void_every_attempt(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make()
    await play(env, ANSWER)
    monkeypatch.setattr(sandbox_module, "CALL_TIMEOUT", 0.01)
    with pytest.raises(UnexplainedCrash, match="could not be saved"):
        await env.step("submit")


def spy(env: HarborTasks) -> list[bool]:
    """Record the runs of the tests from now on: whether each is on the untouched task."""
    tested, runs = env._tested, []

    async def recorded(task: Task, snapshot: Snapshot | None) -> Outcome:
        runs.append(snapshot is None)
        return await tested(task, snapshot)

    env._tested = recorded
    return runs


async def test_the_untouched_task_is_tested_until_it_has_a_verdict(make: Make) -> None:
    env = make()
    runs = spy(env)
    for _ in range(2):
        _, _, _, _, info = await play(env, "bash rm /bin/bash", "submit")
        assert "neither reward.txt" in info["verdict_error"]
    assert runs == [False, True, False]
    (env.tasks[0].folder / "tests" / "test.sh").write_text("#!/bin/bash\nexit\n", encoding="utf-8")
    for _ in range(2):  # a task without a verdict is tested again: the machine may have been too slow
        with pytest.raises(EnvContractError, match="is broken"):
            await play(env, "submit")
    assert runs == [False, True, False, False, True, False, True]


async def test_destroying_the_tests_pays_no_more_than_doing_nothing(make: Make) -> None:
    env = make({"success_reward": -5}, test=TEST.replace("echo 0", "echo -3"))
    assert (await play(env, "submit"))[1] == -3.0
    _, reward, _, _, info = await play(env, "bash rm /bin/bash", "submit")
    assert (reward, info["success"]) == (-3.0, False)


async def test_a_sandbox_that_fails_while_the_untouched_task_is_tested_voids_the_episode(make: Make) -> None:
    env = make(test="#!/bin/bash\n[ -e /app/sum.txt ] && exit\nsleep 60; echo 0 >/logs/verifier/reward.txt\n")
    await env.reset(seed=0)
    await env.step(ANSWER)
    runs, (place,) = spy(env), env._places.values()
    submitting = asyncio.ensure_future(env.step("submit"))
    while not submitting.done():
        await asyncio.sleep(1.0)
        running = docker("ps", "--quiet", "--filter", f"ancestor={place.image}").split()
        if runs == [False, True] and running:
            docker("rm", "--force", *running)
    with pytest.raises(EnvCrashed) as caught:
        await submitting
    assert not isinstance(caught.value, UnexplainedCrash)
    assert env._verdicts == {}


async def test_rewards_by_name(make: Make) -> None:
    test = '#!/bin/bash\necho \'{"reward": 0.5, "speed": 3}\' >/logs/verifier/reward.json\n'
    _, reward, done, _, info = await play(make(test=test), "submit")
    assert (reward, done, info["success"], info["metrics"]) == (0.5, True, False, {"reward": 0.5, "speed": 3.0})
    env = make({"reward": "speed", "success_reward": 3}, test=test)
    _, reward, _, _, info = await play(env, "submit")
    assert (reward, info["success"]) == (3.0, True)


async def test_when_the_time_is_over_the_tests_run(make: Make) -> None:
    env = make({"time_limit": 0.5})
    text, reward, terminated, truncated, info = await play(env, ANSWER, "bash sleep 5")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert "[the time of 0.5 s is over]" in text


async def test_variables_users_and_the_working_directory(make: Make) -> None:
    user = "RUN echo ann:x:1234:1234::/home/ann:/bin/bash >>/etc/passwd; mkdir /work; chown 1234 /work\n"
    dockerfile = f"{DOCKERFILE}{user}ENV FROM_IMAGE=yes\n"
    more = 'workdir = "/work"\n[environment.env]\nA = "${MINE:-x y}"\n[solution.env]\nB = "it\'s"\n'
    config = (
        '[task]\nname = "agentkit/{name}"\n[agent]\nuser = "ann"\n[verifier]\nuser = "root"\nenv = {{C = "c"}}\n'
        '[environment]\nnetwork_mode = "no-network"\n{more}'
    )
    test = (
        '#!/bin/bash\n[ "$(id -u):$A:$C:$FROM_IMAGE:$PWD:$(cat b)" = "0:x y:c:yes:/work:it\'s" ] && r=1\n'
        "echo ${{r:-0}} >/logs/verifier/reward.txt\n".replace("{{", "{").replace("}}", "}")
    )
    env = make(dockerfile=dockerfile, more=more, config=config, test=test, solution='#!/bin/sh\nprintf %s "$B" >b\n')
    text = (await play(env, 'bash echo "$(id -u) $(id -g) $A $FROM_IMAGE $HOME $PWD"; touch /app/x'))[0]
    assert text.splitlines()[0] == "1234 1234 x y yes /home/ann /work"
    assert "Permission denied" in text
    told = [await env.step(action) for action in env.expert()]
    assert told[-1][1] == 1.0


async def test_files_of_a_solution_arrive_unchanged(make: Make, tmp_path: Path) -> None:
    env = make(solution=SOLUTION.replace("python3", "cmp /solution/data /app/data && /solution/sub/run && python3"))
    folder = env.tasks[0].folder
    data = bytes(range(256)) * 4
    (folder / "solution" / "data").write_bytes(data)
    (folder / "environment" / "data").write_bytes(data)
    (folder / "environment" / "Dockerfile").write_text(f"{DOCKERFILE}COPY data /app/\n", encoding="utf-8")
    (folder / "solution" / "sub").mkdir()
    (folder / "solution" / "sub" / "run").write_text("#!/bin/sh\n# END_OF_FILE\n# it's $HOME `id`\n", encoding="utf-8")
    (folder / "solution" / "sub" / "run").chmod(0o755)
    await env.reset(seed=0)
    told = [await env.step(action) for action in env.expert()]
    assert [step[1] for step in told] == [0.0, 1.0], told


async def test_an_image_by_name_and_a_healthcheck(make: Make) -> None:
    image = "agentkit/base"
    more = f"docker_image = '{image}'\nworkdir = '/made/for/it'\n"
    more += "[environment.healthcheck]\ncommand = 'test -d /logs/agent'\n"
    test = '#!/bin/bash\n[ "$(cat /root/it)" = 5 ] && r=1\necho ${r:-0} >/logs/verifier/reward.txt\n'
    config = '[agent]\nuser = 0\n[verifier]\nuser = 0\n[environment]\nnetwork_mode = "no-network"\n{more}'
    env = make(dockerfile=None, more=more, test=test, config=config)
    assert (await play(env, "bash pwd", "bash echo 5 >/root/it", "submit"))[1] == 1.0
    assert "verdict_error" in (await play(env, "bash rm /bin/bash", "submit"))[4]


async def test_images_that_cannot_be_used_are_errors(make: Make) -> None:
    bad = {
        "cannot be built": "FROM agentkit/base\nRUN false\n",
        "would run as user 65534": "FROM agentkit/base\nUSER 65534\n",
        "declares volumes": f"{DOCKERFILE}VOLUME /app/data\n",
    }
    for problem, dockerfile in bad.items():
        with pytest.raises(ImageError, match=problem):
            await make(dockerfile=dockerfile).reset(seed=0)
    with pytest.raises(ImageError, match="no user 'nemo'"):
        await make(config='[agent]\nuser = "nemo"\n[environment]\nnetwork_mode = "no-network"\n').reset(seed=0)
    with pytest.raises(ImageError, match=r"no image 'agentkit/none'; build it|no image 'agentkit/none'"):
        await make(dockerfile=None, more='docker_image = "agentkit/none"\n').reset(seed=0)


async def test_a_removed_sandbox_voids_the_episode_and_killed_processes_do_not(make: Make) -> None:
    env = make()
    await env.reset(seed=0)
    assert env._lease is not None
    docker("rm", "--force", env._lease.box.id)
    with pytest.raises(EnvCrashed) as caught:
        await env.step(ANSWER)
    assert not isinstance(caught.value, UnexplainedCrash)
    await env.reset(seed=0)
    assert (await play(env, "bash kill -9 -1", "submit"))[1:3] == (0.0, True)
    assert (await play(env, ANSWER, "bash kill -9 -1", "submit"))[1:3] == (1.0, True)


def test_the_start_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/integrations/harbor.md").read_text(encoding="utf-8")
    start = re.search(r"```bash\n(.*?)```", page, re.DOTALL)
    assert start is not None
    commands = start[1].replace("pip install", "true").replace("agentkit sandbox build", "true")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "[reward: 1]" in done.stdout


async def test_nothing_is_left_behind(make: Make) -> None:
    env = make()
    await play(env, ANSWER, "submit")
    await env.reset(seed=0)
    task = asyncio.ensure_future(env.step("submit"))
    await asyncio.sleep(0.3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await env.close()
    (place,) = env._places.values()
    assert docker("ps", "--all", "--quiet", "--filter", f"ancestor={place.image}") == ""
