"""Task directories of Harbor: what is read, what is refused, and verdicts as text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from harbor_cases import CONFIG, write_task
from hypothesis import given, settings
from hypothesis import strategies as st
from requiring import require

import agentkit
from agentkit import prefixes, registry
from agentkit.errors import (
    ConfigError,
    DiskFull,
    EngineUnavailable,
    EnvContractError,
    FileTooLarge,
    ImageError,
    MissingExtra,
    RegistryError,
    SandboxError,
    SandboxLost,
    StartTimeout,
)
from agentkit.integrations import harbor_tasks
from agentkit.integrations.harbor import HarborTasks
from agentkit.integrations.harbor_verdict import (
    NoVerdict,
    Verdict,
    cause_of_files,
    chosen,
    parse_json,
    parse_text,
    settle,
)
from agentkit.sandboxes.images import dockerfiles
from agentkit.sandboxes.images.dockerfiles import User, find_user, parse_users
from agentkit.sandboxes.spec import Network


@pytest.fixture(autouse=True)
def _installed() -> None:
    require(not prefixes.PREFIXES["harbor"].problem(), "pip install 'agentkit-rl[harbor]'")


def test_a_folder_of_tasks_and_a_single_task(tmp_path: Path) -> None:
    write_task(tmp_path / "two", instruction="<!-- a canary GUID -->\n# another CANARY\n\nDo it.\n# canary stays\n")
    one = write_task(tmp_path / "one")
    (tmp_path / "notes").mkdir()
    env = agentkit.make(f"harbor:{tmp_path}")
    assert [task.id for task in env.tasks] == ["agentkit/one", "agentkit/two"]
    assert env.tasks[1].instruction == "Do it.\n# canary stays\n"
    assert env.tasks[0].config.verifier.timeout_sec == 60
    assert [task.id for task in agentkit.make(f"harbor:{one}").tasks] == ["agentkit/one"]
    assert [task.id for task in agentkit.make(f"harbor:{tmp_path}", names=["agentkit/two"]).tasks] == ["agentkit/two"]


def test_without_a_name_the_folder_names_the_task(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "plain", config="", more="")
    task = harbor_tasks.load(folder)[0]
    assert task.id == "plain"
    assert task.config.verifier.timeout_sec == 600
    assert harbor_tasks.network_of(task.config.environment, task.config.agent) == Network.bridge()


def test_parts_share_no_task(tmp_path: Path) -> None:
    for number in range(30):
        write_task(tmp_path / f"t{number}", instruction=f"Task {number}.\n")
    parts = [{task.id for task in agentkit.make(f"harbor:{tmp_path}", split=part).tasks} for part in ("train", "test")]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == 30
    assert all(parts)


REFUSED = {
    "several steps": ("[[steps]]\nname = 'a'\n", {}),
    "windows": ("os = 'windows'\n", {}),
    "MCP servers": ("[[environment.mcp_servers]]\nname = 'm'\nurl = 'http://m'\n", {}),
    "a TPU": ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'\n", {}),
    "several containers": ("", {"environment/docker-compose.yaml": "services: {}\n"}),
    "an earlier conversation": ("", {"trajectory.json": "{}"}),
}


@pytest.mark.parametrize("need", REFUSED)
def test_what_agentkit_does_not_have_is_named(tmp_path: Path, need: str) -> None:
    more, files = REFUSED[need]
    folder = write_task(tmp_path / "tasks" / "odd", more=more)
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"cannot run .*odd \(it needs .*{need}"):
        harbor_tasks.load(folder)
    write_task(tmp_path / "tasks" / "good")
    with pytest.warns(UserWarning, match=rf"1 tasks of .* are left out: odd .*{need}"):
        assert [task.id for task in harbor_tasks.load(tmp_path / "tasks")] == ["agentkit/good"]


@pytest.mark.parametrize(
    ("verifier", "need"),
    [
        ('environment_mode = "separate"', "a separate container for its tests"),
        ('[verifier.environment]\ndocker_image = "x"', "a separate container for its tests"),
        ('[[verifier.collect]]\ncommand = "x"', "commands between the agent and the tests"),
        ('user = "grader"', "tests as user 'grader'"),
    ],
)
def test_verifiers_that_agentkit_does_not_have_are_named(tmp_path: Path, verifier: str, need: str) -> None:
    config = CONFIG.replace("timeout_sec = 60.0", f"timeout_sec = 60.0\n{verifier}")
    with pytest.raises(ConfigError, match=need):
        harbor_tasks.load(write_task(tmp_path / "odd", config=config))


def _broken(folder: Path, path: str, text: str | None) -> Path:
    write_task(folder)
    (folder / path).unlink()
    if text is not None:
        (folder / path).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("task.toml", "[agent\n", "task.toml"),
        ("task.toml", "[agent]\ntimeout_sec = 'long'\n", "agent.timeout_sec"),
        ("task.toml", "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['http://a']\n", "allowed_hosts"),
        ("task.toml", "[environment]\ncpus = inf\n", "cpus"),
        ("instruction.md", None, "instruction.md cannot be read"),
        ("tests/test.sh", None, "has no tests/test.sh"),
        ("environment/Dockerfile", None, "neither environment/Dockerfile nor docker_image"),
    ],
)
def test_malformed_tasks_are_errors(tmp_path: Path, path: str, text: str | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        harbor_tasks.load(_broken(tmp_path / "task", path, text))


def test_wrong_names_and_arguments_are_errors(tmp_path: Path) -> None:
    write_task(tmp_path / "one")
    with pytest.raises(RegistryError, match="lacks the name"):
        agentkit.make("harbor:")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tasks": tmp_path / "nothing"}, "there is no directory"),
        ({"tasks": tmp_path / "one" / "tests"}, r"has a task\.toml"),
        ({"tasks": tmp_path, "names": ["x"]}, "has no task x"),
        ({"tasks": tmp_path, "resources": {"memori": 1}}, "no limits for agentkit/one"),
        ({"tasks": tmp_path, "resources": {"memory": "1 potato"}}, "no limits for agentkit/one"),
        ({"tasks": tmp_path, "network": "some"}, "network"),
        ({"tasks": tmp_path, "time_limit": -1}, "time_limit"),
        ({"tasks": tmp_path, "output_limit": 1}, "output_limit"),
    ]
    for arguments, problem in wrong:
        with pytest.raises(ConfigError, match=problem):
            HarborTasks(**arguments)
    write_task(tmp_path / "again" / "one")
    (tmp_path / "two").symlink_to(tmp_path / "again" / "one")
    with pytest.raises(ConfigError, match="the same name 'agentkit/one'"):
        harbor_tasks.load(tmp_path)


@pytest.mark.parametrize("part", ["tests", "solution"])
def test_links_out_of_the_task_are_errors(tmp_path: Path, part: str) -> None:
    folder = write_task(tmp_path / "one")
    (folder / part / "inside").symlink_to(folder / "instruction.md")
    assert "inside" in harbor_tasks.load(folder)[0].files(part)  # pyright: ignore[reportArgumentType]
    (folder / part / "passwd").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="leads out of the task directory"):
        harbor_tasks.load(folder)


def test_tasks_read_only_the_variables_that_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    more = '[environment.env]\nPLAIN = "a"\nWITH = "${SECRET:-none}"\n'
    task = harbor_tasks.load(write_task(tmp_path / "one", more=more))[0]
    given = task.config.environment.env
    assert harbor_tasks.variables(task, given, {"SECRET": "x"}, ()) == {"PLAIN": "a", "WITH": "none"}
    assert harbor_tasks.variables(task, given, {"SECRET": "x"}, ["SECRET"]) == {"PLAIN": "a", "WITH": "x"}
    write_task(tmp_path / "two", more='[environment.env]\nMUST = "${SECRET}"\n')
    with pytest.raises(ConfigError, match=r"agentkit/two needs the variable SECRET .*host_env=\['SECRET'\]"):
        agentkit.make(f"harbor:{tmp_path / 'two'}")
    assert agentkit.make(f"harbor:{tmp_path / 'two'}", host_env=["SECRET"]).tasks


def test_limits_networks_and_healthchecks_are_those_of_the_task() -> None:
    environment = harbor_tasks.Environment.model_validate
    limits = harbor_tasks.resources_of(environment({"memory_mb": 512, "cpus": 2, "gpus": 0}), {})
    assert (limits.memory, limits.cpus, limits.gpus) == (512 << 20, 2, None)
    old = environment({"memory": "2G", "allow_internet": False})
    assert (old.memory_mb, old.network_mode) == (2048, "no-network")
    limits = harbor_tasks.resources_of(old, {"memory": "1g", "tmp": "10m"})
    assert (limits.memory, limits.tmp) == (1 << 30, 10 << 20)
    agent = harbor_tasks.Agent(
        network_mode="allowlist", allowed_hosts=["*.example.org", "192.0.2.0/24", "2001:db8::/32"]
    )
    assert harbor_tasks.network_of(old, agent) == Network.allow(("*.example.org",), ("192.0.2.0/24", "2001:db8::/32"))
    assert harbor_tasks.network_of(old, harbor_tasks.Verifier()) == Network.none()
    assert harbor_tasks.network_of(environment({"network_mode": "allowlist"}), harbor_tasks.Agent()) == Network.none()
    check = harbor_tasks.Healthcheck(command="true", interval_sec=1, timeout_sec=2, start_period_sec=10, retries=4)
    assert harbor_tasks.ready_of(check) == ("true", 22)
    assert harbor_tasks.ready_of(None) == ("", 0)


def test_an_environment_that_makes_sandboxes_stays_here(tmp_path: Path) -> None:
    write_task(tmp_path / "one")
    id = f"harbor:{tmp_path}"
    assert registry.arguments_here(id, {}, "docker") == {"backend": "docker"}
    with pytest.raises(ConfigError, match="makes sandboxes itself"):
        agentkit.make(id, sandbox="docker", backend="remote")
    assert registry.arguments_here("gymnasium:Taxi-v3", {}, "docker") is None


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(tmp_path / "one")
    monkeypatch.setattr("agentkit.extras.HARBOR", ("docker", "no_such_package"))
    with pytest.raises(MissingExtra, match=r"pip install 'agentkit-rl\[harbor\]'"):
        agentkit.make(f"harbor:{tmp_path}")


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("0.25\n", 0.25), (" -3e2 ", -300), ("1_0", 10)])
def test_a_text_is_one_reward(text: str, value: float) -> None:
    assert parse_text(text) == {"reward": value}


@pytest.mark.parametrize("text", ["", "\n", "nan", "inf", "-Infinity", "1 2", "yes", "1e999", "0x1"])
def test_texts_that_are_no_verdict(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_text(text)


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ('{"reward": 0.5}', {"reward": 0.5}),
        ('{"speed": 2, "reward": 1}', {"speed": 2.0, "reward": 1.0}),
        ('{"done": true}', {"done": 1.0}),
    ],
)
def test_an_object_has_rewards_by_name(text: str, rewards: dict[str, float]) -> None:
    assert parse_json(text) == rewards


NO_REWARDS = [
    "", "{}", "[]", "1", "null", "[1.0]", '"1"', '{"reward": null}', '{"reward": "1"}', '{"reward": NaN}',
    '{"reward": 1e999}', '{"reward": -Infinity}', '{"reward": [1]}', '{"a": 1, "reward": Infinity}', "[" * 100_000,
    '{"reward": 1' + "0" * 400 + "}", '{"reward": 1' + "0" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_REWARDS, ids=lambda text: text[:30] or "empty")
def test_objects_that_are_no_verdict(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


@settings(max_examples=50)
@given(st.text(max_size=30) | st.floats().map(str) | st.integers().map(str))
def test_a_text_is_a_finite_reward_or_an_error(text: str) -> None:
    for parse in (parse_text, parse_json):
        try:
            rewards = parse(text)
        except ValueError:
            continue
        assert rewards
        assert all(math.isfinite(value) for value in rewards.values())


def test_the_reward_is_the_named_one_or_the_only_one() -> None:
    assert chosen({"a": 0.5}, "reward") == 0.5
    assert chosen({"a": 0.5, "reward": 1.0}, "reward") == 1.0
    assert chosen({"a": 0.5, "reward": 1.0}, "a") == 0.5
    with pytest.raises(ValueError, match=r"no reward 'reward' among \['a', 'b'\]"):
        chosen({"a": 0.5, "b": 1.0}, "reward")


def test_users_of_an_image() -> None:
    users = parse_users("root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\nodd:line\nno:x:a:b:::\n")
    assert set(users) == {"root", "ann"}
    ann = User(1000, 1001, "/home/ann")
    assert find_user("ann", users) == find_user("1000", users) == ann
    assert find_user("ann:5", users) == User(1000, 5, "/home/ann")
    assert find_user("7:8", users) == User(7, 8, "/")
    assert find_user("0", {}) == User(0, 0, "/root")
    assert find_user("bob", users) is None
    assert find_user("ann:staff", users) is None


def test_the_name_of_an_image_changes_with_its_files(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one") / "environment"
    names = [dockerfiles.name_of(folder, "agentkit/harbor")]
    assert names[0] == dockerfiles.name_of(write_task(tmp_path / "two") / "environment", "agentkit/harbor")
    (folder / "numbers.txt").chmod(0o755)
    names.append(dockerfiles.name_of(folder, "agentkit/harbor"))
    (folder / "numbers.txt").write_text("1\n", encoding="utf-8")
    names.append(dockerfiles.name_of(folder, "agentkit/harbor"))
    (folder / "link").symlink_to("numbers.txt")
    names.append(dockerfiles.name_of(folder, "agentkit/harbor"))
    (folder / "empty").mkdir()
    names.append(dockerfiles.name_of(folder, "agentkit/harbor"))
    assert len(set(names)) == 5


@pytest.mark.parametrize(("untouched", "reward"), [(0.0, 0.0), (1.0, 0.0), (0.3, 0.0), (-2.0, -2.0)])
def test_tests_that_work_on_the_untouched_task_blame_the_policy(untouched: float, reward: float) -> None:
    verdict = settle("t", NoVerdict("no bash"), Verdict(untouched, {"reward": untouched}))
    assert verdict == Verdict(reward, {}, error="no bash")


def test_tests_that_never_work_blame_the_task() -> None:
    with pytest.raises(EnvContractError, match=r"task t is broken.*no bash.*no tests.*repair its tests") as caught:
        settle("t", NoVerdict("no bash"), NoVerdict("no tests"))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DiskFull("full"), "program"),
        (FileTooLarge("sparse"), "program"),
        (StartTimeout("refused", phase="start"), "program"),
        (SandboxLost("gone", reason="oom"), "program"),
        (SandboxLost("gone", reason="removed"), "external"),
        (EngineUnavailable("down"), "external"),
        (ImageError("removed"), "external"),
        (SandboxError("odd"), "unexplained"),
    ],
)
def test_causes_of_files_that_cannot_be_used(error: SandboxError, cause: str) -> None:
    assert cause_of_files(error) == cause
