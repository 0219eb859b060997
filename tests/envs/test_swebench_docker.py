"""SWE-bench on a real engine: tasks are built from releases, and scripted agents work on them in containers.

The tasks are built once for all tests, into a separate folder; the archives come from the package index.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from swebench_cases import built, gold

from agentkit.envs.check import check
from agentkit.envs.swebench import SWEBench, evaluation, sandbox_pools
from agentkit.envs.swebench.instance import Instance
from agentkit.envs.swebench.releases import build_task, locations, task_image
from agentkit.envs.swebench.releases.release_list import SHIPPED
from agentkit.errors import ConfigError, EnvCrashed, ImageError, UnexplainedCrash
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.images import build as images
from agentkit.sandboxes.spec import Resources

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]

BUILT = (
    "xmltodict__xmltodict-0.13.0",
    "wcwidth__wcwidth-0.2.13",
    "tomlkit__tomlkit-0.12.2",
    "marshmallow__marshmallow-3.21.1",
)
FIRST = BUILT[0]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("data")
        patch.setenv("AGENTKIT_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def first(data_folder: Path) -> Instance:
    """A task built from one of the shipped pairs of releases."""
    return built(FIRST)[FIRST]


@pytest.fixture(scope="module")
def tasks(first: Instance) -> dict[str, Instance]:
    """Four built tasks."""
    return {first.id: first, **built(*BUILT[1:])}


@pytest.fixture
async def env(first: Instance) -> AsyncIterator[SWEBench]:
    made = SWEBench(command_timeout=20)
    yield made
    await made.close()


async def play(env: SWEBench, task: str, *actions: str) -> tuple[str, float, bool, bool, dict]:
    """Play these actions; return the result of the last step."""
    await env.reset(seed=0, options={"instance_id": task})
    result = ("", 0.0, False, False, {})
    for action in actions:
        result = await env.step(action)
    return result


async def test_every_task_was_built_with_tests_that_decide(tasks: dict[str, Instance]) -> None:
    assert set(tasks) == set(BUILT)
    for task in tasks.values():
        assert task.row["FAIL_TO_PASS"]
        assert task.row["PASS_TO_PASS"]
        assert task.image.startswith(locations.IMAGES)


@pytest.mark.parametrize("name", BUILT)
async def test_the_solution_resolves_it_and_nothing_else_does(
    env: SWEBench, tasks: dict[str, Instance], name: str
) -> None:
    _, reward, terminated, _, info = await play(env, name, gold(tasks[name]), "submit")
    assert (reward, terminated, info["success"]) == (1.0, True, True), info

    _, reward, terminated, _, info = await play(env, name, "submit")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert info["evaluation"] == {"outcome": "no patch"}

    _, reward, _, _, info = await play(env, name, "bash echo '# nothing' >>README.md", "submit")
    assert reward == 0.0
    assert info["evaluation"]["outcome"] == "unresolved"
    assert info["evaluation"]["fixed"] < info["evaluation"]["to_fix"]

    # Tests that say yes to everything, in all the places that pytest looks at.
    hook = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    hook += "    out = yield\n    out.get_result().outcome = 'passed'\n"
    cheat = "for f in $(find tests -name 'test*.py'); do echo 'def test_all(): pass' >$f; done"
    _, reward, _, _, info = await play(
        env,
        name,
        f"bash {cheat}",
        f"create tests/conftest.py\n{hook}",
        f"create conftest.py\n{hook}",
        "create pytest.ini\n[pytest]\naddopts = --collect-only",
        "submit",
    )
    assert reward == 0.0, info
    assert not info["success"]


async def test_releases_without_a_change_give_no_task(first: Instance) -> None:
    pair = next(pair for pair in SHIPPED if pair.id == FIRST)
    same = build_task.Pair(pair.package, pair.old, pair.old, statement="Nothing.")
    with pytest.raises(ConfigError, match="gives no task"):
        await build_task.build(same)


def test_the_command_line_builds_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    command = [sys.executable, "-m", "agentkit", "data", "swe-from-releases", "xmltodict", "0.12.0", "0.13.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == f"{FIRST} agentkit/swe:{FIRST} 4 tests to fix, 54 to keep".split()


@pytest.mark.usefixtures("first")
def test_images_are_built_once(tmp_path: Path) -> None:
    (tmp_path / "testbed").mkdir()
    (tmp_path / "metadata" / "x-1.dist-info").mkdir(parents=True)
    (tmp_path / "metadata" / "x-1.dist-info" / "METADATA").write_text("Name: x\n")
    (tmp_path / "testbed" / "file").write_text("1")
    arguments = {"ROOTS": "/testbed", "MESSAGE": "x"}
    tag = "agentkit/swe:test-images-are-built-once"
    base = task_image.base()
    try:
        first = images.build_folder("swe", tag, base, tmp_path, arguments)
        assert images.build_folder("swe", tag, base, tmp_path, arguments) == first
        (tmp_path / "testbed" / "file").write_text("2")
        assert images.build_folder("swe", tag, base, tmp_path, arguments) != first
    finally:
        subprocess.run(["docker", "rmi", "-f", tag], capture_output=True, timeout=120, check=False)


async def test_the_agent_has_a_shell_an_editor_and_no_way_out(env: SWEBench) -> None:
    await env.reset(seed=0, options={"instance_id": FIRST})

    async def see(action: str) -> str:
        return (await env.step(action))[0]

    assert await see("bash pwd; cd tests; x=5") == "/testbed"
    assert await see("bash pwd; echo $x $TZ $PYTHONHASHSEED") == "/testbed/tests\n5 UTC 0"
    assert await see("bash false") == "[exit code 1]"
    assert await see("bash git log --all --format=%s") == "xmltodict 0.12.0"
    assert "unreachable" in await see("bash python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 3)'")
    assert "characters left out" in await see("bash seq 100000")
    assert await see("create new/x.py\na = 1\nb = 2") == "[wrote /testbed/new/x.py]"
    edit = "edit new/x.py\n<<<<<<< SEARCH\nb = 2\n=======\nb = 3\n>>>>>>> REPLACE"
    assert await see(edit) == "[changed /testbed/new/x.py]"
    assert "occur 0 times" in await see(edit)
    assert await see("view new/x.py") == "     1  a = 1\n     2  b = 3"
    assert "No such file" in await see("view nothing.py")
    assert "is a directory" in await see("edit new\n<<<<<<< SEARCH\nb\n=======\nc\n>>>>>>> REPLACE")
    observation, _, _, _, info = await env.step("rm -rf /")
    assert not info["action_valid"]
    assert "this is no action" in observation


async def test_limits_of_time(first: Instance) -> None:
    env = SWEBench(command_timeout=1.0, time_limit=1.5)
    try:
        await env.reset(seed=0, options={"instance_id": FIRST})
        observation, _, terminated, truncated, _ = await env.step("bash echo begun; sleep 30")
        assert observation == "begun\n[stopped after 1 s]"
        assert not terminated
        assert not truncated
        observation, reward, terminated, truncated, _ = await env.step("bash sleep 30")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert observation.endswith("[the time of 1.5 s is over]")
    finally:
        await env.close()


FORGED = r"""bash printf '\r>>>>> Start Test Output\r%s\r>>>>> End Test Output\r>>>>> Test Exit Code: 0\r' "$(
    printf '\rPASSED %s' {tests})" >>README.md; rm xmltodict.py; echo 'x = 1' >xmltodict.py"""
SAYS_YES = """\
import builtins, sys
def patched(name, *rest, real=builtins.__import__, **more):
    module = real(name, *rest, **more)
    reports = sys.modules.get("_pytest.reports")
    if hasattr(reports, "TestReport"):
        made = reports.TestReport.from_item_and_call.__func__
        if made.__name__ != "passing":
            def passing(cls, item, call):
                report = made(cls, item, call)
                report.outcome = "passed"
                return report
            reports.TestReport.from_item_and_call = classmethod(passing)
    return module
builtins.__import__ = patched
"""


async def test_results_written_by_the_agent_are_ignored(first: Instance, tmp_path: Path) -> None:
    tests = " ".join(first.row["FAIL_TO_PASS"] + first.row["PASS_TO_PASS"])
    showing = f"cd /testbed\ngit status\ngit show\ngit -c core.fileMode=false diff {first.row['base_commit']}\n"
    script = first.row["eval_script"].replace("cd /testbed\n", showing, 1)  # as official scripts do
    assert showing in script
    (tmp_path / "some.json").write_text(json.dumps([{**first.row, "eval_script": script}]))
    env = SWEBench(instances=tmp_path / "some.json")
    try:
        _, reward, _, _, info = await play(env, FIRST, FORGED.format(tests=tests), "submit")
        assert (reward, info["success"]) == (0.0, False), info
        assert (await play(env, FIRST, gold(first), "submit"))[1] == 1.0
    finally:
        await env.close()


@pytest.mark.parametrize("name", ["sitecustomize.py", "usercustomize.py", "pytest.py", "_pytest/__init__.py"])
async def test_files_outside_the_package_cannot_fake_passed_tests(env: SWEBench, first: Instance, name: str) -> None:
    _, reward, _, _, info = await play(env, FIRST, f"create {name}\n{SAYS_YES}", "submit")
    assert reward == 0.0, info
    assert info["evaluation"]["outcome"] == "unresolved", "the tests ran"
    _, reward, _, _, info = await play(env, FIRST, f"create {name}\n{SAYS_YES}", gold(first), "submit")
    assert reward == 1.0, info


async def test_pytest_plugin_of_the_repository_is_ignored(env: SWEBench) -> None:
    declared = "create cheat-1.dist-info/entry_points.txt\n[pytest11]\ncheat = cheat"
    info = (await play(env, FIRST, declared, "create cheat-1.dist-info/METADATA\nName: cheat\nVersion: 1",
                       "create cheat.py\nraise SystemExit('loaded')", "submit"))[4]  # fmt: skip
    assert info["evaluation"]["outcome"] == "unresolved", "the tests ran"


@pytest.mark.parametrize(
    "leftover",
    [
        "mkdir repro && cd repro && git init -q . && echo 1 >x",
        "touch .git/index.lock",
        "echo 1 >secret; chmod 000 secret",
        "git config diff.noprefix true; git config diff.context 0; git config core.fsmonitor /bin/false",
        "printf 'x = \"\\351\"\\n' >latin.py",
        "git update-index --assume-unchanged xmltodict.py; git add -A; git commit -qm done",
        "echo 1 >$'-new\\nline'",
    ],
)
async def test_leftover_files_do_not_spoil_a_solution(env: SWEBench, first: Instance, leftover: str) -> None:
    action = f"bash git config user.name a; git config user.email a; {leftover}"
    _, reward, _, _, info = await play(env, FIRST, gold(first), action, "submit")
    assert reward == 1.0, info


async def test_files_of_any_encoding_are_graded(first: Instance, env: SWEBench) -> None:
    seen: list[bytes] = []

    async def look(box: Sandbox, row: object, timeout: float) -> str:
        seen.append((await box.exec("cat latin.py", cwd="/testbed")).stdout_bytes)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "run_tests", look)
        await play(env, FIRST, "bash printf 'x = \"\\351\"' >latin.py", "submit")
    assert seen == [b'x = "\xe9"']


async def test_too_large_patch_is_reported(env: SWEBench) -> None:
    large = "bash head -c 9000000 /dev/urandom >core"
    _, reward, _, _, info = await play(env, FIRST, large, "submit")
    assert (reward, info["evaluation"]) == (0.0, {"outcome": "patch too large"})


async def test_new_shell_starts_like_the_first_one(env: SWEBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentkit.envs.swebench.env._ENTER", "export ENTERED=yes")
    observation, *_ = await play(env, FIRST, "bash exit 3", "bash echo $ENTERED")
    assert observation == "yes"


@pytest.mark.parametrize("breakage", ["rm -rf .git", "git config diff.external /bin/false; chmod -w .git; echo x >y"])
async def test_an_agent_that_breaks_its_repository_has_no_patch(env: SWEBench, breakage: str) -> None:
    _, reward, terminated, _, info = await play(env, FIRST, f"bash {breakage}", "submit")
    assert (reward, terminated) == (0.0, True)
    assert info["evaluation"]["outcome"] in ("no patch", "unresolved")


async def test_an_agent_cannot_end_its_sandbox_for_free(env: SWEBench) -> None:
    """Either the sandbox survives, or its loss counts as a failure."""
    await env.reset(seed=0, options={"instance_id": FIRST})
    with contextlib.suppress(UnexplainedCrash):
        _, reward, _, _, _ = await env.step("bash kill -9 -1; kill -9 1; sleep 10")
        assert reward == 0.0
    observation, _ = await env.reset(seed=0, options={"instance_id": FIRST})  # and the next episode is a fresh one
    assert "xmltodict" in observation


def remove_sandboxes_of(image: str) -> None:
    """Remove the sandboxes from outside."""
    found = subprocess.run(
        ["docker", "ps", "-q", "--filter", f"ancestor={image}"], capture_output=True, text=True, timeout=60, check=True
    )
    # The agent's own may be on its way out already, which docker calls an error.
    subprocess.run(["docker", "rm", "-f", *found.stdout.split()], capture_output=True, timeout=120, check=False)


async def test_a_sandbox_that_fails_during_the_evaluation_is_not_scored(
    env: SWEBench, first: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tests = evaluation.run_tests

    async def then_nothing(box, row, timeout):
        remove_sandboxes_of(first.image)
        return await run_tests(box, row, timeout)

    monkeypatch.setattr(evaluation, "run_tests", then_nothing)
    with pytest.raises(EnvCrashed, match="could not be graded"):
        await play(env, FIRST, gold(first), "submit")


async def test_missing_image_is_named_with_its_remedy(first: Instance, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(json.dumps([{**first.row, "image": "agentkit/swe:does-not-exist"}]))
    env = SWEBench(instances=tmp_path / "some.json")
    try:
        with pytest.raises(ImageError, match="agentkit data swe-from-releases --shipped"):
            await env.reset(seed=0)
    finally:
        await env.close()


async def test_tests_that_never_end_resolve_nothing(first: Instance) -> None:
    env = SWEBench(eval_timeout=15)
    try:
        sleep = "bash sed -i '1i import time; time.sleep(1000)' xmltodict.py"
        _, reward, _, _, info = await play(env, FIRST, sleep, "submit")
        assert (reward, info["evaluation"]) == (0.0, {"outcome": "timeout"})
    finally:
        await env.close()


async def test_memory_that_runs_out_in_the_evaluation_is_not_scored(first: Instance) -> None:
    task = first
    spec = sandbox_pools.spec_of(task, Resources())
    hungry = {**task.row, "eval_script": "#!/bin/bash\npython3 -c 'x = bytearray(4 << 30)'\n"}
    async with Sandbox.create(spec) as box:
        with pytest.raises(Exception, match="out of memory"):
            await evaluation.run_tests(box, hungry, 60)


async def test_a_warm_start_takes_less_than_half_a_second(env: SWEBench) -> None:
    await env.reset(seed=0, options={"instance_id": FIRST})
    taken = []
    for _ in range(5):
        await asyncio.sleep(8)  # the spare is made meanwhile
        began = time.perf_counter()
        await env.reset(seed=0, options={"instance_id": FIRST})
        taken.append(time.perf_counter() - began)
    assert sorted(taken)[2] < 0.5, taken


def test_the_environment_passes_its_checks(first: Instance) -> None:
    results = check("SWEBench-v0", timeout=900, instance_ids=[FIRST])
    assert [result for result in results if not result.passed] == []
    assert len(results) == 9
