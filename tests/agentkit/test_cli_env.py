"""`agentkit env` as a user sees it."""

import json
import shutil

import pytest
from requiring import require
from typer.testing import CliRunner

from agentkit import registry
from agentkit.cli.env import app, arguments_of
from agentkit.envs.base import TextEnv
from agentkit.errors import ConfigError, RegistryError


def run(*arguments, stdin=None, fails=False):
    result = CliRunner().invoke(app, arguments, input=stdin)
    if not fails and result.exception is not None:
        raise result.exception
    return result


def test_list_names_every_environment():
    output = run("list").output
    assert all(name in output for name in ("FrozenLake-v1", "Sokoban-v0", "Countdown-v0", "built-in"))
    rows = json.loads(run("list", "--json", "--load").output)
    errors = {row["id"]: row["error"] for row in rows if row["source"] == "built-in"}
    assert {"Countdown-v0", "FrozenLake-v1", "Sokoban-v0", "WebShop-v0"} <= set(errors)
    assert set(errors.values()) == {None}
    libraries = {row["id"]: row["source"] for row in rows}
    assert libraries["gymnasium:NAME"] == "library gymnasium"


def test_info_shows_rules_and_arguments():
    output = run("info", "Sokoban-v0").output
    assert "Push every box onto a target" in output
    assert "vocabulary='symbols'" in output
    with pytest.raises(RegistryError, match="did you mean Sokoban-v0"):
        run("info", "sokoban")


def test_check_reports_each_result_and_fails_with_one():
    result = run("check", "Countdown-v0", "numbers=3")
    assert "9 of 9 checks passed" in result.output
    result = run("check", "FrozenLake-v1", "size=1", fails=True)
    assert result.exit_code == 1
    assert "size=1 must be at least 2" in result.output


def test_play_and_check_in_a_sandbox():
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    output = run("play", "FrozenLake-v1", "size=5", "--expert", "--sandbox", "local").output
    assert "\nsolved, return 1" in output
    assert (
        "ok    in a sandbox: the same episodes on local" in run("check", "FrozenLake-v1", "--sandbox", "local").output
    )
    with pytest.raises(ConfigError, match="leave out --web or --sandbox"):
        run("play", "WebShop-v0", "--web", "--sandbox", "local")


def test_the_expert_plays_to_the_end():
    output = run("play", "FrozenLake-v1", "size=5", "--expert", "--episodes", "3").output
    assert output.count("\nsolved, return 1") == 3
    assert "solved 3 of 3" in output


class Undecided(TextEnv):
    """Two equal paths; the expert switches between them at each call."""

    instructions = "Go round."
    max_turns = 4
    concurrency = "inline"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.way, self.asked = [], 0
        return "at the fork", {"success": False, "action_valid": True}

    def step(self, action):
        self.way.append(action)
        success = self.way[-2:] in (["left", "left"], ["right", "right"])
        return " ".join(self.way), float(success), success, False, {"success": success, "action_valid": True}

    def expert(self):
        self.asked += 1
        yield from ["left", "left"] if self.asked % 2 else ["right", "right"]


class Lost(Undecided):
    def expert(self):
        yield "back"


def test_the_expert_follows_its_plan(monkeypatch):
    monkeypatch.setattr(registry, "_explicit", {})
    registry.register("Undecided-v0", Undecided)
    output = run("play", "Undecided-v0", "--expert").output
    assert "2. left  reward 1" in output
    assert "solved, return 1" in output


def test_a_failing_check_prints_the_episode(monkeypatch):
    monkeypatch.setattr(registry, "_explicit", {})
    registry.register("Lost-v0", Lost)
    result = run("check", "Lost-v0", fails=True)
    assert result.exit_code == 1
    assert "FAIL  expert solves it: the expert does not solve seeds" in result.output
    assert "      seed 0\n      at the fork\n      1. back  reward 0.0\n" in result.output


def test_play_shows_the_rules_for_the_arguments():
    assert "such as 7 - 3\n" in run("play", "Countdown-v0", "numbers=2", "--expert").output
    assert "slippery" in run("play", "FrozenLake-v1", "is_slippery=true", "--expert").output


def test_a_random_agent_plays_within_the_turns():
    output = run("play", "Sokoban-v0", "--random", "--seed", "4").output
    assert "solved, return" in output


def test_a_person_plays_with_abbreviations_and_may_stop():
    desc = "desc=[SF, FG]"
    output = run("play", "FrozenLake-v1", desc, stdin="r\nwest\nDown\n").output
    assert "1. Right" in output
    assert "2. west  (no such action)" in output
    assert "solved, return 1" in output
    assert "stopped" in run("play", "FrozenLake-v1", desc, stdin="r\n").output
    assert "stopped" in run("play", "FrozenLake-v1", desc, stdin="\n").output


def test_contradictory_players_are_refused():
    with pytest.raises(ConfigError, match="contradict"):
        run("play", "FrozenLake-v1", "--expert", "--random")


def test_arguments_are_yaml():
    assert arguments_of(["size=8", "is_slippery=true", "split=train", "p=0.5", "desc=[SF, FG]", "level=null"]) == {
        "size": 8,
        "is_slippery": True,
        "split": "train",
        "p": 0.5,
        "desc": ["SF", "FG"],
        "level": None,
    }
    for wrong in ("size", "=3", "a b=3", "size=[1"):
        with pytest.raises(ConfigError, match=r"key=value|cannot be read"):
            arguments_of([wrong])
