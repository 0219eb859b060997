"""Replays of recorded episodes: what is compared, in which sandbox, and who may start one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from chromium import Browser
from dashboard_runs import HOSTILE, make_run, turn
from local_harness import runtime_directory as runtime_directory
from local_sandboxes import local_sandboxes
from typer.testing import CliRunner

import agentkit
from agentkit import registry
from agentkit.cli import app
from agentkit.config import EnvConfig
from agentkit.dashboard.export import export
from agentkit.dashboard.replay import compare, replay
from agentkit.dashboard.replay_process import ReplayError, Replays
from agentkit.dashboard.server import Dashboard
from agentkit.errors import AgentkitError, ConfigError
from agentkit.store import Recorder
from agentkit.trainers.rollout.episode import act
from agentkit.trainers.rollout.hosts import InlineEnv
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import Trajectory

pytestmark = pytest.mark.usefixtures("runtime_directory")
PENALTY = -0.1


def play(id: str, seed: int) -> Trajectory:
    """Play the expert's actions as a run plays answers, after one without a format and one with no such action."""
    env = agentkit.make(id)
    env.reset(seed=seed)
    plan = list(env.expert())
    env.close()
    answers = ["no format", "<answer>Fly</answer>", *(f"<answer>{action}</answer>" for action in plan)]

    async def played() -> Trajectory:
        handle, parser = InlineEnv(EnvSource.of(EnvConfig(id=id))), ActionParser("tagged", 1)
        made = Trajectory(0, 0, id, seed, 0)
        observation = shown = await handle.reset(seed)
        done = None
        for answer in answers:
            read = parser.parse(answer)
            made.turns.append(replace(turn(answer, observation=shown), actions=read.actions, valid=read.valid))
            done = await act(handle, made, made.turns[-1], observation, parser, PENALTY)
            observation, shown = done.observation, done.shown
        assert done is not None
        assert done.terminated
        await handle.close()
        return made

    return asyncio.run(played())


class Here:
    """An environment in this process, with the methods of one in a sandbox."""

    def __init__(self, id: str) -> None:
        self._env = agentkit.make(id)

    async def reset(self, *, seed: int) -> Any:
        return self._env.reset(seed=seed)

    async def step(self, action: str) -> Any:
        return self._env.step(action)


def record(path: Path, *episodes: Trajectory, settings: tuple[str, ...] = ()) -> Path:
    directory = make_run(path, done=0, settings=settings)
    with Recorder(directory) as recorder:
        for episode in episodes:
            recorder.episode(1, episode, "trained")
    directory.release()
    return directory.path


FIRST = 10
"""Id of the first episode of ``record``, after those of an evaluation."""


@pytest.fixture(scope="module")
def lake() -> Trajectory:
    return play("FrozenLake-v1", 3)


@pytest.fixture(scope="module")
def run(lake: Trajectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an episode as it was, and one with another text as its last observation."""
    doctored = replace(lake, turns=[*lake.turns[:-1], replace(lake.turns[-1], observation=HOSTILE)])
    return record(tmp_path_factory.mktemp("replay") / "run", lake, doctored)


# --- what is compared


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Sokoban-v0"])
def test_the_same_actions_give_the_same_episode(id: str) -> None:
    played = play(id, 5)
    assert [played.turns[0].actions, played.turns[1].valid] == [(), False]
    assert asyncio.run(compare(Here(id), played, PENALTY)) is None


@pytest.mark.parametrize(
    ("place", "change", "what"),
    [
        (2, {"observation": "another map"}, "observation"),
        (3, {"reward": 0.5}, "reward"),
        (1, {"valid": True}, "validity"),
        (0, {"actions": ("Right",), "valid": True, "reward": 0.0}, "observation"),
        (-1, {"actions": ("Up",)}, "reward"),
    ],
)
def test_the_first_difference_is_found(lake: Trajectory, place: int, change: dict[str, Any], what: str) -> None:
    turns = list(lake.turns)
    turns[place] = replace(turns[place], **change)
    found = asyncio.run(compare(Here("FrozenLake-v1"), replace(lake, turns=turns), PENALTY))
    assert found is not None
    shown = place + 1 + (place == 0)  # the effect of another action is seen at the next turn
    assert (found.turn, found.what) == (shown if place >= 0 else len(turns), what)
    assert found.recorded != found.replayed


def test_endings_are_compared_but_not_those_of_interrupted_episodes(lake: Trajectory) -> None:
    def difference(**change: Any) -> Any:
        found = asyncio.run(compare(Here("FrozenLake-v1"), replace(lake, **change), PENALTY))
        return found and (found.turn, found.what, found.recorded, found.replayed)

    last = len(lake.turns)
    assert difference(success=False) == (last, "success", "not solved", "solved")
    assert difference(outcome="truncated", reason="max_turns") == (last, "ending", "goes on", "terminated")
    assert difference(turns=lake.turns[:-1]) == (last - 1, "ending", "terminated", "goes on")
    cut = {"turns": lake.turns[:-1], "success": False}
    assert difference(**cut, outcome="truncated", reason="max_turns") is None
    lost = replace(lake.turns[-1], reward=0.0)
    for reason in ("EnvCrashed: it ended", "interrupted"):
        assert difference(turns=[*lake.turns[:-1], lost], outcome="voided", reason=reason, success=False) is None


# --- in a sandbox


def test_the_command_replays_in_a_sandbox(run: Path) -> None:
    assert asyncio.run(local_sandboxes()) == 0
    same = CliRunner().invoke(app, ["show", str(run), "--episode", str(FIRST), "--replay"])
    assert same.exit_code == 0, same.output
    assert "identical" in same.output
    assert "in a local sandbox" in same.output
    other = CliRunner().invoke(app, ["show", str(run), "--episode", str(FIRST + 1), "--replay"])
    assert other.exit_code == 1
    assert "differs: observation" in other.output
    assert r"\x1b]0;title\x07" in other.output
    assert not set(other.output) & set("\x1b\x07\u202e")
    assert CliRunner().invoke(app, ["show", str(run), "--replay"]).exit_code == 2
    assert asyncio.run(local_sandboxes()) == 0


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("Missing-v0", "install the environment's extra or plug-in"),
        ("CodeContest-v0", "makes its sandboxes itself"),
        ("Countdown-v0", "one of FrozenLake-v1"),
    ],
)
def test_environments_that_cannot_be_replayed_say_why(lake: Trajectory, tmp_path: Path, id: str, text: str) -> None:
    played = lake if id == "Countdown-v0" else replace(lake, env_id=id)
    path = record(tmp_path / "run", played, settings=(f"env.id={id}",))
    with pytest.raises(AgentkitError, match=text):
        asyncio.run(replay(path, FIRST))
    assert asyncio.run(local_sandboxes()) == 0


LAKES = """
from agentkit.envs.frozen_lake.env import FrozenLake

class Chance(FrozenLake):
    deterministic = False

class Failing(FrozenLake):
    def step(self, action):
        raise OSError("\x1b[2J the disk is broken")
"""


def test_environments_of_chance_and_those_that_fail(
    lake: Trajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replayed_lakes.py").write_text(LAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = {}
    for name in ("Chance", "Failing"):
        spec = registry.EnvSpec(f"replayed_lakes:{name}")
        monkeypatch.setitem(registry._explicit, f"{name}-v0", registry.Entry(f"{name}-v0", spec, "explicit"))
        paths[name] = record(tmp_path / name, replace(lake, env_id=f"{name}-v0"), settings=(f"env.id={name}-v0",))
    with pytest.raises(ConfigError, match="not deterministic"):
        asyncio.run(replay(paths["Chance"], FIRST))
    found = asyncio.run(replay(paths["Failing"], FIRST))["difference"]
    assert (found["turn"], found["what"], found["recorded"]) == (2, "failure", "no failure")
    assert r"EnvCrashed: step raised OSError: \x1b[2J the disk is broken" in found["replayed"]
    assert asyncio.run(local_sandboxes()) == 0


def test_one_replay_at_a_time_which_ends_with_the_server(run: Path) -> None:
    replays, errors = Replays(), []

    def first() -> None:
        with pytest.raises(ReplayError, match="was ended") as error:
            replays.replay(run, FIRST)
        errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    while replays._running is None:
        time.sleep(0.01)
    with pytest.raises(ReplayError, match="another replay is running"):
        replays.replay(run, FIRST)
    process = replays._running
    while asyncio.run(local_sandboxes()) == 0:
        assert process.poll() is None
        time.sleep(0.01)
    replays.close()
    thread.join()
    assert errors
    assert process.poll() is not None
    assert asyncio.run(local_sandboxes()) == 0


def test_a_replay_has_a_time_limit(run: Path) -> None:
    replays = Replays(timeout=0.2)
    with pytest.raises(ReplayError, match=r"more than 0\.2 s"):
        replays.replay(run, FIRST)
    assert replays._running is not None
    assert replays._running.poll() is not None


# --- the page


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Dashboard]:
    with Dashboard([run], port=0) as server:
        yield server


def test_only_the_page_starts_replays(server: Dashboard, run: Path) -> None:
    base, token = server.url.split("?token=")
    address, bearer = f"{base}api/replay?run=run&id={FIRST}", {"Authorization": f"Bearer {token}"}
    assert httpx.post(address).status_code == 401
    assert httpx.post(f"{address}&token={token}").status_code == 401
    foreign = (
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "x.org"},
    )
    for headers in foreign:
        assert httpx.post(address, headers=bearer | headers).status_code == 403
        cookie = {"Cookie": f"agentkit_{server.port}={token}"}
        assert httpx.post(address, headers=cookie | headers).status_code == 403
    assert httpx.get(address, headers=bearer).status_code == 404
    assert httpx.post(f"{base}api/runs", headers=bearer).status_code == 404
    for asked in ("run=../run&id=1", "run=run&id=x"):
        assert httpx.post(f"{base}api/replay?{asked}", headers=bearer).status_code == 404
    missing = httpx.post(f"{base}api/replay?run=run&id=999", headers=bearer, timeout=60)
    assert (missing.status_code, "999" in missing.json()["error"]) == (409, True)
    with Dashboard([run], port=0, token=False) as open_server:
        refused = httpx.post(f"{open_server.url}api/replay?run=run&id={FIRST}")
        assert (refused.status_code, "--no-token" in refused.text) == (403, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_shows_the_result(browser: Browser, server: Dashboard, run: Path, tmp_path: Path) -> None:
    click = "document.querySelector('.replay button').click()"
    browser.visit(server.url, f"episode?run=run&id={FIRST}", "document.querySelector('.replay button')")
    browser.evaluate(click)
    browser.wait("document.querySelector('.replay .badge.finished')")
    assert "identical" in browser.text(".replay")
    assert "local sandbox" in browser.text(".replay")
    browser.visit(server.url, f"episode?run=run&id={FIRST + 1}", "document.querySelector('.replay button')")
    browser.evaluate(click)
    browser.wait("document.querySelectorAll('.replay .sides pre').length == 2")
    assert "<script>window.attacked = 1</script>" in browser.text(".replay .sides")
    assert browser.evaluate("window.attacked") is None
    assert browser.evaluate("document.querySelectorAll('.replay script, .replay img').length") == 0
    export([run], tmp_path / "copy")
    browser.visit(
        (tmp_path / "copy" / "index.html").as_uri(), f"episode?run=run&id={FIRST}", "document.querySelector('.replay')"
    )
    assert browser.evaluate("document.querySelector('.replay button').disabled")
    assert "needs the server" in browser.text(".replay")
