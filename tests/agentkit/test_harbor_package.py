"""Harbor's own package: it reads the same task directories, and its trials give the same rewards.

The package lives in a separate environment, which `.ci/harbor --install-only` creates.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from harbor_cases import CONFIG, DOCKERFILE, TEST, write_task
from requiring import require
from rollout_doubles import ScriptedEngine
from rollout_harness import renderer

import agentkit
from agentkit.config import ModelConfig
from agentkit.errors import ConfigError, EnvContractError
from agentkit.integrations import harbor_tasks
from agentkit.integrations.harbor import HarborTasks
from agentkit.integrations.harbor_export import PROGRAM, export
from agentkit.integrations.harbor_sandbox import IMAGES
from agentkit.sandboxes.images import build, dockerfiles
from agentkit.trainers.endpoint.dialogue import Dialogues
from agentkit.trainers.endpoint.server import ChatServer
from agentkit.trainers.endpoint.service import ChatService
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.episode import invalid_answer_message, system_message
from agentkit.trainers.rollout.parser import ActionParser

pytestmark = [pytest.mark.harbor, pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHON = Path(os.environ.get("AGENTKIT_HARBOR_PYTHON", ROOT / ".venv-harbor" / "bin" / "python"))
PLAIN = "harbor_player:PlainDocker"
OURS = "agentkit.integrations.harbor_environment:AgentkitEnvironment"
COMMANDS = {
    "oracle": None,
    "wrong": "echo 61 >sum.txt",
    "stale": "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
}
ERRORS = {
    "none": ("exit 0", "RewardFileNotFoundError"),
    "empty": (">/logs/verifier/reward.txt", "RewardFileEmptyError"),
    "nan": ("echo nan >/logs/verifier/reward.txt", "VerifierOutputParseError"),
    "text": ('echo \'{"reward": "1"}\' >/logs/verifier/reward.json', "VerifierOutputParseError"),
}
"""Tests without a verdict, and the errors of Harbor."""


def run(
    tasks: Path, trials: Path, commands: dict[str, Any], place: str = "harbor_player:PlainDocker"
) -> dict[str, Any]:
    """Play all tasks of a folder with Harbor in an environment; return what it says of each."""
    require(PYTHON.exists(), "run .ci/harbor --install-only, or set AGENTKIT_HARBOR_PYTHON")
    require(build.exists("agentkit/base"), "run `PYTHON=.venv/bin/python .ci/docker`")
    command = [str(PYTHON), str(TESTS / "harbor_player.py"), str(tasks), str(trials), json.dumps(commands), place]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", "HARBOR_TELEMETRY": "off"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


async def ours(env: HarborTasks, task: str, way: str) -> dict[str, Any]:
    """Play a task here, in the same way; return what Harbor would say."""
    await env.reset(seed=0, options={"task": task})
    command = COMMANDS[way]
    actions = env.expert() if command is None else iter((f"bash {command}", "submit"))
    try:
        told = [await env.step(action) for action in actions]
    except EnvContractError:
        return {"error": True}
    return {"rewards": told[-1][4]["metrics"]}


async def test_rewards_and_missing_verdicts_are_those_of_harbor(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks / "sum", instruction="# CANARY: 1\n\nWrite the sum.\n")
    several = 'echo \'{"reward": 0.25, "speed": 3, "done": true}\' >/logs/verifier/reward.json'
    write_task(tasks / "several", test=f"#!/bin/bash\n{several}\n")
    for name, (script, _) in ERRORS.items():
        write_task(tasks / name, test=f"#!/bin/bash\n{script}\n")
    theirs = run(tasks, tmp_path / "trials", COMMANDS)
    env = agentkit.make(f"harbor:{tasks}")
    try:
        for task in env.tasks:
            known = theirs[task.folder.name]
            assert known["valid"]
            assert known["instruction"] == task.instruction
            for way in COMMANDS:
                there, here = known[way], await ours(env, task.id, way)
                if expected := ERRORS.get(task.folder.name):
                    assert there["error"] == expected[1], there
                    assert here == {"error": True}
                else:
                    assert here == there
        assert theirs["sum"]["oracle"] == {"rewards": {"reward": 1.0}}
        assert theirs["sum"]["wrong"] == theirs["sum"]["stale"] == {"rewards": {"reward": 0.0}}
    finally:
        await env.close()


def test_its_trials_run_in_our_sandboxes(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    write_task(tasks / "sum")
    write_task(tasks / "none", test="#!/bin/bash\nexit\n")
    user = "RUN echo ann:x:1234:1234::/home/ann:/bin/bash >>/etc/passwd; mkdir /work; chown 1234 /work\n"
    write_task(
        tasks / "user",
        dockerfile=f"{DOCKERFILE}{user}ENV FROM_IMAGE=yes\n",
        more='workdir = "/work"\n[environment.env]\nA = "x y"\n',
        config=CONFIG.replace("[agent]\n", '[agent]\nuser = "ann"\n').replace(
            "[verifier]", '[verifier]\nuser = "root"'
        ),
        solution='#!/bin/bash\necho "$(id -u):$(id -g):$HOME:$A:$FROM_IMAGE:$PWD" >who\n',
        test=(
            '#!/bin/bash\n[ "$(id -u):$(cat who)" = "0:1234:1234:/home/ann:x y:yes:/work" ] && r=1\n'
            "echo ${r:-0} >/logs/verifier/reward.txt\n"
        ),
    )
    more = 'docker_image = "agentkit/base"\nworkdir = "/app"\n[environment.healthcheck]\ncommand = "test -e /app"\n'
    root = CONFIG.replace("[agent]", '[agent]\nuser = "root"')  # the image's default user may not write to /app
    image = write_task(tasks / "image", dockerfile=None, more=more, config=root)
    assert (image / "environment" / "numbers.txt").exists()  # which Harbor copies to the working directory
    copying = {"import_path": "harbor_player:Copying"}
    commands = {"oracle": None, "wrong": COMMANDS["wrong"], "stale": COMMANDS["stale"], "copying": copying}
    told = run(tasks, tmp_path / "trials", commands, OURS)
    good, bad = {"rewards": {"reward": 1.0}}, {"rewards": {"reward": 0.0}}
    for task in ("sum", "image"):
        assert {way: told[task][way] for way in commands} == {
            "oracle": good,
            "wrong": bad,
            "stale": bad,
            "copying": good,
        }
    assert told["user"]["oracle"] == good
    assert told["user"]["wrong"] == bad
    assert told["none"]["oracle"]["error"] == "RewardFileNotFoundError"
    built = dockerfiles.name_of(tasks / "user" / "environment", IMAGES)
    assert subprocess.check_output(["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={built}"]) == b""


ACTIONS = (
    "bash cd /tmp && export N=60 && echo ready",
    "create note.txt\none\ntwo",
    "edit note.txt\n<<<<<<< SEARCH\ntwo\n=======\n60\n>>>>>>> REPLACE",
    "edit note.txt\n<<<<<<< SEARCH\nnine\n=======\n60\n>>>>>>> REPLACE",
    "view note.txt",
    "view /none",
    "view /app",
    "dance",
    "bash pwd; tail -n 1 /app/note.txt >/app/sum.txt; echo $N; ls -l /app/note.txt | cut -c1-10; (exit 3)",
)


async def test_a_model_is_an_agent_there_and_sees_what_it_sees_here(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "tasks" / "sum")
    env = agentkit.make(f"harbor:{folder}")
    try:
        instruction, _ = await env.reset(seed=0)
        here = [(await env.step(action))[0] for action in ACTIONS]
    finally:
        await env.close()
    answers = ["No format.", *(f"I do it.\n<answer>{action}</answer>" for action in ACTIONS)]
    answers += ["<answer>bash sleep 60</answer>", "<answer>bash echo still $N</answer>", "<answer>submit</answer>"]
    queue, shown = iter(answers), []

    def script(text: str, seed: int) -> str:
        shown.append(text)
        return next(queue)

    engine = ScriptedEngine(renderer(), script)
    service = ChatService(engine, Dialogues(load_tokenizer("quickstart"), ModelConfig()), "tiny", 16_384)
    async with ChatServer(service, port=0, tokens=["a-token-of-the-test"]) as server:
        agent = {
            "import_path": "agentkit.integrations.harbor_agent:AgentkitAgent",
            "model_name": "tiny",
            "kwargs": {"url": server.url, "command_timeout": 5},
            "env": {"OPENAI_API_KEY": "a-token-of-the-test"},
        }
        all_told = await asyncio.to_thread(run, folder.parent, tmp_path / "trials", {"model": agent}, OURS)
    told = all_told["sum"]["model"]
    assert told.get("rewards") == {"reward": 1.0}, told
    parser = ActionParser("tagged")
    plain = re.sub(r"\s+", " ", shown[-1])
    expected = [
        system_message(HarborTasks.instructions, parser),
        instruction,
        invalid_answer_message(instruction, parser),
        *here,
        "[stopped after 5 s]",
        "still 60",
    ]
    at = 0
    for text in expected:
        at = plain.find(re.sub(r"\s+", " ", text), at)
        assert at >= 0, (text, shown[-1])
    (prompts,), (results,) = engine.prompts.values(), engine.results.values()
    assert told["rollout"] == [
        {
            "prompt_token_ids": prompts,
            "completion_token_ids": results,
            "logprobs": [[-0.5] * len(ids) for ids in results],
        }
    ]


def test_the_command_of_the_documentation(tmp_path: Path) -> None:
    require(PYTHON.exists(), "run .ci/harbor --install-only, or set AGENTKIT_HARBOR_PYTHON")
    page = (ROOT / "docs/integrations/harbor.md").read_text(encoding="utf-8")
    command = re.search(r"^harbor (run .*)$", page, re.MULTILINE)
    assert command is not None
    write_task(tmp_path / "tasks" / "sum")
    words = [str(PYTHON), "-m", "harbor.cli.main", *command[1].split()]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    (result,) = tmp_path.glob("jobs/*/*/result.json")
    assert json.loads(result.read_text())["verifier_result"]["rewards"] == {"reward": 1.0}, done.stdout + done.stderr


def test_exported_tasks_have_the_same_rewards_there(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    export("CodeContest-v0", tasks, 2, kwargs={"time_limit": 1})
    # In Harbor's containers everyone may write beside the reward.
    late = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        try:\n"
        "            open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')\n        except OSError: pass\n"
    )
    commands = {"oracle": None, "nothing": "true", "late": f"cat >{PROGRAM} <<'END'\n{late}END\n"}
    for known in run(tasks, tmp_path / "trials", commands).values():
        assert known["valid"]
        assert known["oracle"] == {"rewards": {"reward": 1.0}}
        assert known["nothing"] == known["late"] == {"rewards": {"reward": 0.0}}


def test_what_harbor_accepts_is_read_or_named(tmp_path: Path) -> None:
    """A task that Harbor calls valid is read, or refused by name; one that it calls invalid is an error."""
    tasks = tmp_path / "tasks"
    configs = {
        "plain": "",
        "old": 'version = "1.0"\n[environment]\nmemory = "2G"\nallow_internet = false\n',
        "hosts": '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.example.org", "192.0.2.0/24"]\n',
        "steps": '[[steps]]\nname = "a"\n',
        "separate": '[verifier]\nenvironment_mode = "separate"\n',
        "windows": '[environment]\nos = "Windows"\n',
        "toml": "[agent\n",
        "timeout": '[agent]\ntimeout_sec = "long"\n',
        "network": '[environment]\nnetwork_mode = "some"\n',
        "variables": "[environment]\nenv = 1\n",
        "full": CONFIG.format(name="full", more='[environment.healthcheck]\ncommand = "true"\n'),
    }
    for name, config in configs.items():
        folder = write_task(tasks / name, test=TEST)
        (folder / "task.toml").write_text(config, encoding="utf-8")
    for file in ("steps/a/instruction.md", "steps/a/tests/test.sh"):
        (tasks / "steps" / file).parent.mkdir(parents=True, exist_ok=True)
        (tasks / "steps" / file).write_text("x\n", encoding="utf-8")
    (tasks / "windows" / "tests" / "test.bat").write_text("rem\n", encoding="utf-8")
    (write_task(tasks / "untested") / "tests" / "test.sh").unlink()
    (write_task(tasks / "untold") / "instruction.md").unlink()
    theirs = run(tasks, tmp_path / "trials", {})
    for name, known in theirs.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            told, instruction = "", None
            try:
                instruction = harbor_tasks.load(tasks / name)[0].instruction
            except ConfigError as error:
                told = str(error)
        if known["valid"] and "agentkit cannot run" not in told:
            assert (told, instruction) == ("", known["instruction"]), name
        else:
            assert told, name
            assert ("agentkit cannot run" in told) == known["valid"], (name, told)
    assert {name for name, known in theirs.items() if not known["valid"]} == {
        "toml", "timeout", "network", "variables", "untested", "untold",
    }  # fmt: skip
