"""SWE-bench without an engine: instances, grading by the official rules, tools, and a history without a future."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from requiring import require
from swebench_cases import REMEDY, lite_dev, log, row

from agentkit import registry
from agentkit.envs.swebench import evaluation, grading, instance, tools
from agentkit.envs.swebench.env import SWEBench
from agentkit.envs.swebench.git_history import HIDE_FUTURE
from agentkit.envs.swebench.releases import locations
from agentkit.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def _extra() -> None:
    require("swebench", REMEDY)
    require("pyarrow", REMEDY)


# Instances.


@pytest.mark.official
def test_the_official_file_loads_with_its_images_and_tests() -> None:
    tasks = instance.load(lite_dev())
    assert len(tasks) == 23
    first = next(task for task in tasks if task.id == "sqlfluff__sqlfluff-1625")
    assert first.image == "swebench/sweb.eval.x86_64.sqlfluff_1776_sqlfluff-1625:latest"
    assert first.user == "0:0"
    assert first.problem.startswith("TSQL - L031")
    assert json.loads(first.row["FAIL_TO_PASS"]) == ["test/cli/commands_test.py::test__cli__command_directed"]
    assert {task.split for task in tasks} == {"train", "test"}


@pytest.mark.official
def test_the_evaluation_script_is_the_official_one_and_records_the_exit_code() -> None:
    task = next(task for task in instance.load(lite_dev()) if task.id == "sqlfluff__sqlfluff-1625")
    script = grading.eval_script(task.row).splitlines()
    given = task.row["eval_script"].splitlines()
    shown = {"git status", "git show", f"git -c core.fileMode=false diff {task.row['base_commit']}"}
    quiet = [":" if line in shown else line for line in given]
    assert quiet.count(":") == 3
    assert [line for line in script if "SWEBENCH_TEST_EXIT_CODE" not in line] == quiet
    added = [line for line in script if "SWEBENCH_TEST_EXIT_CODE" in line]
    assert len(added) == 2
    end = next(n for n, line in enumerate(script) if "End Test Output" in line)
    assert script[end - 1] == "SWEBENCH_TEST_EXIT_CODE=$?"


def test_the_patches_are_tried_with_the_official_commands() -> None:
    assert grading.apply_commands() == (
        "git apply --verbose",
        "git apply --verbose --3way",
        "git apply --verbose --reject",
        "patch --batch --forward --fuzz=5 -p1 -i",
    )


def test_json_and_task_repositories_load_too(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text(json.dumps(row()) + "\n\n" + json.dumps(row(instance_id="o__r-0")) + "\n")
    assert [task.id for task in instance.load(tmp_path / "some.jsonl")] == ["o__r-0", "o__r-1"]
    (tmp_path / "one.json").write_text(json.dumps([row()]))
    assert instance.load(tmp_path / "one.json")[0].row == row()

    folder = tmp_path / "repo" / "tasks" / "o__r-1"
    folder.mkdir(parents=True)
    texts = {"patch": "gold.patch", "test_patch": "test.patch", "eval_script": "eval.sh"}
    texts["problem_statement"] = "problem_statement.md"
    tests = {key: row()[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    (folder / "task.yaml").write_text(json.dumps({k: v for k, v in row().items() if k not in {*texts, *tests}}))
    (folder / "tests.json").write_text(json.dumps(tests))
    for key, name in texts.items():
        (folder / name).write_text(row()[key])
    (loaded,) = instance.load(tmp_path / "repo")
    assert {**row(), "hints_text": ""} == loaded.row


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({k: v for k, v in row().items() if k != "eval_script"}), "o__r-1 lacks eval_script"),
        (json.dumps(row()) + "\n" + json.dumps(row()), "holds o__r-1 twice"),
        (json.dumps(row(image_assets={"patch": [{"path": "a.png"}]})), "needs images"),
        ("", "holds no SWE-bench instance"),
        ("{", "holds no SWE-bench instances"),
    ],
)
def test_instances_that_cannot_be_graded_do_not_load(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "some.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        instance.load(tmp_path / "some.jsonl")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "some.parquet").touch()
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'agentkit-rl\[swe\]'"):
        instance.load(tmp_path / "some.parquet")
    monkeypatch.setitem(sys.modules, "swebench.harness", None)
    grading.official.cache_clear()
    with pytest.raises(ConfigError, match=r"swebench package .* pip install 'agentkit-rl\[swe\]'"):
        grading.official()


def test_without_tasks_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="agentkit data swe-from-releases --shipped"):
        SWEBench()


def test_wrong_arguments_of_the_command_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from agentkit.cli.data import app

    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    for words, message in (
        ([], "give a package and two of its versions, or --shipped"),
        (["pkg", "1.0", "1.1", "--shipped"], "or --shipped"),
        (["pkg", "1.0"], "pkg: two versions are needed"),
    ):
        result = CliRunner().invoke(app, ["swe-from-releases", *words])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


@pytest.mark.official
def test_instances_are_chosen_by_name_and_by_split() -> None:
    every = {task.id for task in SWEBench(instances=lite_dev()).instances}
    parts = [{task.id for task in SWEBench(instances=lite_dev(), split=split).instances} for split in ("train", "test")]
    assert parts[0] | parts[1] == every
    assert not parts[0] & parts[1]
    (one,) = SWEBench(instances=lite_dev(), instance_ids=["pvlib__pvlib-python-1072"]).instances
    assert one.id == "pvlib__pvlib-python-1072"
    with pytest.raises(ConfigError, match="has no instance nobody__nothing-1"):
        SWEBench(instances=lite_dev(), instance_ids=["nobody__nothing-1"])
    with pytest.raises(ConfigError, match="positive number of seconds"):
        SWEBench(instances=lite_dev(), command_timeout=0)
    with pytest.raises(ConfigError, match="are not limits of a sandbox"):
        SWEBench(instances=lite_dev(), resources={"memry": "1g"})


@pytest.mark.official
def test_it_is_registered_and_a_data_set_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkit import data

    assert registry.env_class("SWEBench-v0") is SWEBench
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    data.fetch("swebench-lite-dev", lite_dev().parent)
    assert data.verify("swebench-lite-dev") == []
    assert len(instance.load(locations.find("swebench-lite-dev"))) == 23


# Grading. The rules are those of the official evaluation, written down here by hand.

ALL = {"a": "PASSED", "b": "PASSED", "c": "PASSED", "d": "PASSED", "e[x-1]": "PASSED"}


@pytest.mark.parametrize(
    ("change", "exit_code", "resolved"),
    [
        ({}, 0, True),
        ({"a": "XFAIL"}, 0, True),  # an expected failure passes
        ({"a": "FAILED"}, 1, False),
        ({"a": "SKIPPED"}, 0, False),  # what is skipped is not fixed
        ({"c": "SKIPPED"}, 0, True),  # but it is kept
        ({"c": "ERROR"}, 1, False),
        ({"a": None}, 0, False),  # what is missing has failed
        ({"d": None}, 0, False),
        ({"e[x-1]": None}, 0, False),
        ({"e[x-2]": "PASSED"}, 0, True),  # a name that was cut off stands for all that begin so, if they agree
        ({"e[x-2]": "FAILED"}, 1, False),
        ({"other": "FAILED"}, 1, True),  # tests that are not listed
    ],
)
def test_official_rules(change: dict[str, Any], exit_code: int, resolved: bool) -> None:
    statuses = {name: status for name, status in {**ALL, **change}.items() if status is not None}
    report = grading.report(row(), "a patch", log(exit_code, **statuses))
    assert report.graded
    assert report.resolved is resolved
    assert report.to_fix == 2


def test_results_that_contradict_the_exit_code_are_ignored() -> None:
    assert grading.statuses(row(), log(1, **ALL)) is None
    report = grading.report(row(), "a patch", log(1, **ALL))
    assert not report.graded
    assert not report.resolved


@pytest.mark.parametrize("text", ["", "nonsense", log(0), log(0, **ALL).replace("End Test Output", "")])
def test_a_log_without_results_resolves_nothing(text: str) -> None:
    report = grading.report(row(), "a patch", text)
    assert not report.graded
    assert not report.resolved


def test_signs_of_a_broken_machine_are_reported_and_do_not_count() -> None:
    report = grading.report(row(), "a patch", "OSError: [Errno 12] Cannot allocate memory")
    assert (report.resolved, report.suspicion) == (False, "out_of_memory")


@pytest.mark.official
def test_our_report_is_the_official_one_on_every_instance(tmp_path: Path) -> None:
    from swebench.harness.grading import get_eval_report
    from swebench.harness.utils import make_test_spec

    for number, task in enumerate(instance.load(lite_dev())):
        names = json.loads(task.row["FAIL_TO_PASS"]) + json.loads(task.row["PASS_TO_PASS"])
        failing = set(names[:: 2 + number % 3]) if number % 4 else set()
        lines = [f"{'FAILED' if name in failing else 'PASSED'} {name}" for name in names]
        text = "\n".join([">>>>> Start Test Output", *lines, ">>>>> End Test Output"])
        path = tmp_path / "log"
        path.write_text(text)
        prediction = {"instance_id": task.id, "model_patch": "x", "model_name_or_path": "x"}
        theirs = get_eval_report(make_test_spec(dict(task.row)), prediction, str(path), include_tests_status=True)
        ours = grading.report(task.row, "x", text)
        assert ours.resolved == theirs[task.id]["resolved"] == (not failing)
        assert ours.fixed == len(theirs[task.id]["tests_status"]["FAIL_TO_PASS"]["success"])
        assert ours.broken == len(theirs[task.id]["tests_status"]["PASS_TO_PASS"]["failure"])


def test_everything_runs_with_fixed_time_zone_and_hashes() -> None:
    assert evaluation.ENVIRONMENT["TZ"] == "UTC"
    assert evaluation.ENVIRONMENT["PYTHONHASHSEED"] == "0"


# Tools.


@pytest.mark.parametrize(
    ("action", "call"),
    [
        ("bash ls -la", tools.Bash("ls -la")),
        ("bash\ncd src\nls || true", tools.Bash("cd src\nls || true")),
        ("bash cat <<'E'\n  a\nE", tools.Bash("cat <<'E'\n  a\nE")),
        ("view setup.py", tools.View("setup.py")),
        ("view a file.py 3 10", tools.View("a file.py", 3, 10)),
        ("create a/b.py\nimport os\n\n  x", tools.Create("a/b.py", "import os\n\n  x\n")),
        ("create empty.py", tools.Create("empty.py", "")),
        ("edit x\n<<<<<<< SEARCH\n  a\n=======\n  b\n  c\n>>>>>>> REPLACE", tools.Edit("x", ("  a",), ("  b", "  c"))),
        ("edit x\n<<<<<<< SEARCH\na\n=======\n>>>>>>> REPLACE", tools.Edit("x", ("a",), ())),
        ("edit x\n<<<<<<< SEARCH\na\n=======\n\n>>>>>>> REPLACE", tools.Edit("x", ("a",), ("",))),
        ("edit x\r\n<<<<<<< SEARCH\r\na\r\n=======\r\nb\r\n>>>>>>> REPLACE", tools.Edit("x", ("a",), ("b",))),
        ("submit", tools.Submit()),
        (" submit \n", tools.Submit()),
        ("", None),
        ("bash", None),
        ("ls", None),
        ("submit now", None),
        ("view", None),
        ("view a 1 2\nb", None),
        ("edit x\nnothing", None),
        ("bash echo \0", None),
    ],
)
def test_actions(action: str, call: object) -> None:
    assert tools.parse(action) == call


@pytest.mark.parametrize("block", ["a", "Title\n=======\ntext\n=======\nTitle\n=======\nwords"])
def test_an_ambiguous_block_is_an_error(block: str) -> None:
    with pytest.raises(ValueError, match=f"{block.count('=======')} lines of the block are ======="):
        tools.parse(f"edit x\n<<<<<<< SEARCH\n{block}\n>>>>>>> REPLACE")


def test_the_usage_shows_actions_that_exist() -> None:
    assert isinstance(tools.parse("edit PATH\n" + tools.USAGE.split("edit PATH\n")[1].split("\nsubmit")[0]), tools.Edit)


@pytest.mark.parametrize(
    ("text", "old", "new", "after"),
    [
        ("a\nb\nc\n", "b\n", "x\ny\n", "a\nx\ny\nc\n"),
        ("a\nb\nc\n", "b\n", "", "a\nc\n"),
        ("a\nb\nc\n", "b\n", "\n", "a\n\nc\n"),
        ("a\nb", "b\n", "", "a"),
        ("a\nb", "b\n", "c\nd\n", "a\nc\nd"),
        ("a\r\nb\r\nc\r\n", "a\nb\n", "x\ny\n", "x\r\ny\r\nc\r\n"),
        ("max = 10\n", "x = 1\n", "y = 2\n", 0),
        ("return a\nreturn ab\n", "return a\n", "return b\n", "return b\nreturn ab\n"),
        ("ab = 1\nc = 2\n", "b = 1\n", "", 0),
        ("a\x0cb\nc\n", "c\n", "d\n", "a\x0cb\nd\n"),
        ("a\na\na\n", "a\na\n", "b\n", 2),
        ("a\n", "x\n", "b\n", 0),
        ("a\n", "", "b\n", 0),
    ],
)
def test_replacing(text: str, old: str, new: str, after: str | int) -> None:
    assert tools.replaced(text, old.split("\n")[:-1], new.split("\n")[:-1]) == after


def test_observations_are_bounded_and_say_what_is_missing() -> None:
    assert tools.clip("abc", 3) == "abc"
    assert tools.clip("a" * 50 + "b" * 50, 20) == "a" * 10 + "\n[… 80 characters left out …]\n" + "b" * 10
    assert tools.view("a\nb\nc\n", tools.View("f", 2, 9), 100) == "     2  b\n     3  c"
    assert tools.view("a\n", tools.View("f", 2, 3), 100) == "[the file has 1 lines; there is nothing from 2 to 3]"
    assert tools.view("a\x0cb\r\nc", tools.View("f"), 100) == "     1  a\x0cb\n     2  c"
    assert tools.view("", tools.View("f"), 100) == "[the file is empty]"


# The history.


def _git(where: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always")
    done = subprocess.run(("git", *identity, *words), cwd=where, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def _commit(where: Path, text: str) -> str:
    (where / "file").write_text(text)
    _git(where, "add", "file")
    _git(where, "commit", "-qm", text)
    return _git(where, "rev-parse", "HEAD")


def _exists(where: Path, commit: str) -> bool:
    found = subprocess.run(("git", "cat-file", "-e", commit), cwd=where, capture_output=True, timeout=60, check=False)
    return found.returncode == 0


def test_future_commits_are_removed_everywhere(tmp_path: Path) -> None:
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    _git(origin, "init", "-q", "-b", "main")
    past = [_commit(origin, "one"), _commit(origin, "two")]
    _git(origin, "tag", "-a", "v1", "-m", "before", past[0])
    future = [_commit(origin, "the fix")]
    _git(origin, "tag", "v2")
    _git(tmp_path, "clone", "-q", str(origin), str(clone))
    (clone / "file").write_text("stashed")
    _git(clone, "stash")
    future.append(_git(clone, "rev-parse", "stash"))
    future.append(_commit(clone, "only the reflog knows"))
    _git(clone, "branch", "feature")
    _git(clone, "reset", "-q", "--hard", past[1])
    assert all(_exists(clone, commit) for commit in past + future)

    for _ in range(2):  # the second time there is nothing to do
        done = subprocess.run(["sh", "-c", HIDE_FUTURE], cwd=clone, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert all(_exists(clone, commit) for commit in past)
        assert not any(_exists(clone, commit) for commit in future)
    assert _git(clone, "rev-parse", "HEAD") == past[1]
    assert _git(clone, "tag") == "v1"
    assert _git(clone, "remote") == ""
    assert (clone / "file").read_text() == "two"
