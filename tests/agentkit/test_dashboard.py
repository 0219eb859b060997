"""What the dashboard reads from runs, whom its server answers, and what a static copy contains."""

from __future__ import annotations

import base64
import json
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dashboard_runs import EVALUATED, episode, make_run, turn
from requiring import require
from typer.testing import CliRunner

import agentkit
from agentkit import records
from agentkit.cli import app
from agentkit.dashboard import queries
from agentkit.dashboard.answers import Answers
from agentkit.dashboard.credit import token_credit
from agentkit.dashboard.drawings import draw_episode
from agentkit.dashboard.export import export, joined
from agentkit.dashboard.server import Dashboard, static_files
from agentkit.errors import ConfigError, RunDirectoryError
from agentkit.records import Filter
from agentkit.results import wilson_interval
from agentkit.store import Recorder
from agentkit.types import Trajectory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = make_run(tmp_path / "runs" / "first")
    directory.release()
    return directory.path


# --- queries


def test_the_summary_of_a_finished_run(run: Path) -> None:
    found = queries.summary(run)
    assert (found["status"], found["step"], found["steps"], found["left_s"]) == ("finished", 4, 4, None)
    low, high = wilson_interval(6 / 8, 8)
    assert found["latest"] == {"step": 4, "success": 0.75, "episodes": EVALUATED, "low": low, "high": high}
    assert found["before"]["success"] == 0.25
    assert found["counts"] == {"eval": 2 * EVALUATED + 2, "trained": 24}
    rows = records.list_episodes(run / "episodes.sqlite")
    assert found["tokens"] == sum(row.tokens for row in rows)
    assert found["action_tokens"] == sum(
        trajectory.num_action_tokens for _, trajectory in records.iterate_trajectories(run / "episodes.sqlite")
    )
    assert found["env_s"] == pytest.approx(0.2 * (24 + 2 * EVALUATED))  # two turns each; the voided ones have none


def test_a_run_in_progress_and_one_that_was_killed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=10, done=3)
    found = queries.summary(directory.path)
    assert (found["status"], found["step"]) == ("running", 3)
    assert found["left_s"] >= 0
    before = queries.signature(directory.path)
    directory.release()
    assert queries.summary(directory.path)["status"] == "interrupted"
    assert queries.signature(directory.path) != before


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            [{"event": "start"}, {"event": "failed", "error": "LearnerError", "text": "no"}],
            ("failed", "LearnerError: no"),
        ),
        ([{"event": "start"}, {"event": "end", "finished": False}], ("stopped", "")),
        ([{"event": "start"}, {"event": "end", "finished": False}, {"event": "start"}], ("interrupted", "")),
        ([{"event": "start"}, {"event": "end", "finished": True}, {"event": "rollback"}], ("finished", "")),
    ],
)
def test_the_status_follows_from_the_last_event(events: list[dict[str, Any]], expected: tuple[str, str]) -> None:
    assert queries.status_of(events, True, False) == expected


def test_remaining_time_and_work_leave_out_the_time_between_sessions() -> None:
    events = [{"event": "start", "time": 0.0}, {"event": "start", "time": 1000.0}]
    lines = [
        {"step": step, "time": time} for step, time in ((1, 10.0), (2, 20.0), (3, 1030.0), (4, 1040.0), (5, 1050.0))
    ]
    assert queries.seconds_left(events, lines, steps=9) == pytest.approx(40)
    assert queries.seconds_of_work(events, lines) == pytest.approx(20 + 50)
    assert queries.seconds_left(events, lines[:3], steps=9) is None


def test_alerts_of_a_run_are_listed_and_those_that_last_are_counted(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=10, done=6)
    with Recorder(directory) as recorder:
        for step, subject in ((2, "time/train"), (4, "time/wait")):
            recorder.event("alert", name="slow_phase", subject=subject, step=step, text="t", cause="c", remedy="r")
        recorder.event("alert_ended", name="slow_phase", subject="time/train", step=5, began=2)
    directory.release()
    found = queries.alerts(directory.path)
    assert [(alert["subject"], alert["step"], alert["ended"]) for alert in found] == [
        ("time/train", 2, 5),
        ("time/wait", 4, None),
    ]
    assert {"text": "t", "cause": "c", "remedy": "r"}.items() <= found[0].items()
    assert queries.summary(directory.path)["alerts"] == 1


def test_metrics_are_columns_by_step(run: Path) -> None:
    found = queries.metrics(run)
    assert found["steps"] == [0, 1, 2, 3, 4]
    assert found["values"]["rollout/success"] == [None, 0.1, 0.2, 0.3, 0.4]
    assert found["values"]["eval/success"] == [0.25, None, None, None, 0.75]


def test_runs_differ_in_family_unless_only_their_seeds_differ(tmp_path: Path) -> None:
    for name, seed, settings in (("a", 0, []), ("b", 1, []), ("c", 0, ["learner.lr=0.5"])):
        make_run(tmp_path / name, done=0, seed=seed, settings=settings).release()
    families = [queries.summary(tmp_path / name)["family"] for name in "abc"]
    assert families[0] == families[1] != families[2]


def test_runs_are_found_below_folders_and_named_by_their_paths(tmp_path: Path) -> None:
    for name in ("one/a", "one/b", "two"):
        make_run(tmp_path / name, done=0).release()
    (tmp_path / "one" / "a" / "failed-1").mkdir()
    (tmp_path / "one" / "a" / "failed-1" / "config.yaml").write_text("{}")
    assert list(queries.find_runs([tmp_path])) == ["one/a", "one/b", "two"]
    assert list(queries.find_runs([tmp_path / "two"])) == ["two"]
    assert list(queries.find_runs([tmp_path / "one" / "a", tmp_path / "one" / "b"])) == ["a", "b"]
    with pytest.raises(RunDirectoryError, match="not a folder"):
        queries.find_runs([tmp_path / "three"])


def table(path: Path, **known: Any) -> dict[str, Any]:
    return json.loads(queries.episode_table(path, **known))


def test_the_table_repeats_the_records(run: Path) -> None:
    found = table(run)["columns"]
    rows = records.list_episodes(run / "episodes.sqlite")
    for name in (
        "id",
        "step",
        "ending",
        "group_id",
        "member",
        "env_id",
        "seed",
        "outcome",
        "reason",
        "turns",
        "tokens",
    ):
        assert found[name] == [getattr(row, name) for row in rows]
    assert found["reward"] == [row.reward for row in rows]


def test_the_table_continues_where_the_caller_left_off(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=10, done=2)
    first = table(directory.path)
    known = {"after": first["columns"]["id"][-1], "at": first["last_at"], "count": len(first["columns"]["id"])}
    assert table(directory.path, **known)["columns"]["id"] == []
    with Recorder(directory) as recorder:
        recorder.episode(3, episode(9, 0, 1.0), "trained")
    more = table(directory.path, **known)
    assert (more["after"], len(more["columns"]["id"])) == (known["after"], 1)


def test_the_table_begins_again_when_episodes_were_replaced(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=10, done=2)
    first = table(directory.path)
    known = {"after": first["columns"]["id"][-1], "at": first["last_at"], "count": len(first["columns"]["id"])}
    with Recorder(directory) as recorder:
        recorder.rollback(1)
        for member in range(6):  # as many as were removed, with the same ids
            recorder.episode(2, episode(77, member, 0.0), "trained")
    again = table(directory.path, **known)
    assert again["columns"]["id"] == first["columns"]["id"]
    assert again["after"] == 0
    assert again["columns"]["group_id"][-6:] == [77] * 6


def test_records_of_format_1_are_read_and_continued(run: Path) -> None:
    file = run / "episodes.sqlite"
    with sqlite3.connect(file) as db:
        for column in ("action_tokens", "generate_s", "env_s", "ended_at"):
            db.execute(f"alter table episodes drop column {column}")
        db.execute("pragma user_version = 1")
    db.close()
    assert queries.summary(run)["env_s"] is None
    assert set(table(run)["columns"]["env_s"]) == {None}
    count = len(records.list_episodes(file))
    db = records.open_for_writing(file)
    records.insert(db, [records.PendingEpisode(5, episode(50, 0, 1.0), "trained", "")])
    db.close()
    assert table(run)["columns"]["env_s"] == [None] * count + [0.2]
    assert records.read_episode(file, count + 1)[1].group_id == 50


def test_an_episode_is_complete(run: Path) -> None:
    number = records.list_episodes(run / "episodes.sqlite", Filter(ending="trained"))[1].id
    found = queries.episode(run, number, lambda ids: f"<{ids[0]}>")
    assert found["group"] == [number - 1, number, number + 1]
    assert (found["reward"], found["system"], found["generate_s"]) == (1.0, "Reach the goal.", pytest.approx(0.6))
    last = found["turns"][-1]
    assert (last["response"], last["actions"], last["versions"]) == ("Right", ["Right"], [[0, 2]])
    assert last["action_logprobs"] == np.linspace(-0.1, -1.0, 2, dtype=np.float32).tolist()
    assert found["vocabulary"] == {"1": "<1>", "2": "<2>", "3": "<3>"}


def test_members_of_an_evaluation_are_of_one_evaluation(run: Path) -> None:
    rows = records.list_episodes(run / "episodes.sqlite", Filter(ending="eval"))
    assert queries.episode(run, rows[0].id, None)["group"] == [rows[0].id]


def test_any_text_reaches_the_page_unchanged(tmp_path: Path) -> None:
    text = "\ud800 \u202e \x1b[2J </script> \u2028 é"
    directory = make_run(tmp_path / "run", done=0)
    with Recorder(directory) as recorder:
        recorder.episode(1, episode(0, 0, 0.0, turns=[turn(text, observation=text)]), "trained")
    directory.release()
    number = records.list_episodes(directory.episodes_file)[-1].id
    answer = Answers([directory.path]).answer("episode", {"run": "run", "id": str(number)})
    assert answer.isascii()
    assert json.loads(answer)["turns"][0]["response"] == text


def test_advantages_are_those_of_the_batch(run: Path) -> None:
    rows = records.list_episodes(run / "episodes.sqlite", Filter(ending="trained", step=2))
    returns = np.array([row.reward for row in rows[:3]])
    for row, reward in zip(rows, returns, strict=False):
        expected = (reward - returns.mean()) / (returns.std(ddof=1) + 1e-6)
        _, trajectory = records.read_episode(run / "episodes.sqlite", row.id)
        found = token_credit(run, row.id)
        assert found["advantages"] == pytest.approx([expected] * trajectory.num_action_tokens)
    assert set(token_credit(run, rows[3].id)["advantages"]) == {0.0}  # its group has equal returns


def test_missing_advantages_say_why(run: Path, tmp_path: Path) -> None:
    evaluated = records.list_episodes(run / "episodes.sqlite", Filter(ending="eval"))[0].id
    assert "was not trained on" in token_credit(run, evaluated)["note"]
    settings = ["algorithm.advantage=gae", "critic={count: 2}"]
    directory = make_run(tmp_path / "critics", settings=settings)
    directory.release()
    trained = records.list_episodes(directory.episodes_file, Filter(ending="trained"))[0].id
    assert "values of a critic" in token_credit(directory.path, trained)["note"]


def test_a_damaged_run_does_not_hide_the_others(run: Path) -> None:
    other = make_run(run.parent / "second")
    other.release()
    other.metrics_file.write_text("{broken\n")
    first, second = json.loads(Answers([run.parent]).answer("runs", {}))
    assert (first["status"], second["status"]) == ("finished", "unreadable")
    assert "metrics.jsonl" in second["error"]


# --- pictures


def play(seed: int, counts: list[int]) -> tuple[Trajectory, list[np.ndarray]]:
    """Take these numbers of the expert's actions in FrozenLake; return the episode with pictures of its states."""
    env = agentkit.make("FrozenLake-v1", render_mode="rgb_array")
    made = Trajectory(0, 0, "FrozenLake-v1", seed, 0)
    observation, pictures = env.reset(seed=seed)[0], [env.render()]
    plan = list(env.expert())
    for count in counts:
        taken, plan = tuple(plan[:count]), plan[count:]
        made.turns.append(replace(turn("answer", observation=observation), actions=taken))
        for action in taken:
            observation = env.step(action)[0]
        pictures.append(env.render())
    env.close()
    return made, pictures


def read_png(address: str) -> np.ndarray:
    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    width, height = struct.unpack(">II", content[16:24])
    rows = np.frombuffer(zlib.decompress(content[41:-16]), np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def test_pictures_are_those_of_the_states(tmp_path: Path) -> None:
    played, expected = play(5, [1, 0, 2])
    directory = make_run(tmp_path / "run", done=0)
    with Recorder(directory) as recorder:
        recorder.episode(1, played, "trained")
    directory.release()
    number = records.list_episodes(directory.episodes_file)[-1].id
    found = draw_episode(directory.path, number)
    assert found["note"] == ""
    assert len(found["pictures"]) == 4
    for address, picture in zip(found["pictures"], expected, strict=True):
        np.testing.assert_array_equal(read_png(address), picture)


def test_a_record_that_the_environment_does_not_repeat_is_not_drawn(run: Path, tmp_path: Path) -> None:
    played, _ = play(5, [1, 1])
    played.turns[1] = replace(played.turns[1], observation="another map")
    directory = make_run(tmp_path / "run", done=0)
    with Recorder(directory) as recorder:
        recorder.episode(1, played, "trained")
    directory.release()
    found = draw_episode(directory.path, records.list_episodes(directory.episodes_file)[-1].id)
    assert len(found["pictures"]) == 1
    assert "From turn 2 on" in found["note"]


def test_environments_without_pictures_are_not_replayed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", settings=["env.id=Countdown-v0"])
    directory.release()
    assert draw_episode(directory.path, 1) == {"pictures": [], "pages": 0, "note": ""}


def test_pages_of_an_environment_are_served_without_rights(tmp_path: Path) -> None:
    require("bm25s", "pip install 'agentkit-rl[webshop]'")
    directory = make_run(tmp_path / "run", settings=["env.id=WebShop-v0"])
    env = agentkit.make("WebShop-v0")
    played = Trajectory(0, 0, "WebShop-v0", 3, 0)
    observation, pages = env.reset(seed=3)[0], [env.page()]
    for action in list(env.expert())[:2]:
        played.turns.append(replace(turn("answer", observation=observation), actions=(action,)))
        observation = env.step(action)[0]
        pages.append(env.page())
    env.close()
    with Recorder(directory) as recorder:
        recorder.episode(1, played, "trained")
    directory.release()
    number = records.list_episodes(directory.episodes_file)[-1].id
    assert draw_episode(directory.path, number) == {"pictures": [], "pages": 3, "note": ""}
    with Dashboard([directory.path], port=0) as server:
        base, token = server.url.split("?token=")
        headers = {"Authorization": f"Bearer {token}"}
        asked = {"run": "run", "id": str(number)}
        for state, page in enumerate(pages):
            answer = httpx.get(f"{base}page", params={**asked, "state": str(state)}, headers=headers)
            assert answer.text == page
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "sandbox;" in policy
            assert "script-src" not in policy
        assert httpx.get(f"{base}page", params={**asked, "state": "3"}, headers=headers).status_code == 404
        assert httpx.get(f"{base}page", params={**asked, "state": "0"}).status_code == 401
    export([directory.path], tmp_path / "copy")
    assert (tmp_path / "copy" / "data" / "0" / f"page-{number}-2.html").read_text().endswith(pages[2])


# --- server


@pytest.fixture
def server(run: Path) -> Iterator[Dashboard]:
    with Dashboard([run.parent], port=0) as server:
        yield server


def test_the_link_opens_the_page_and_its_cookie_the_rest(server: Dashboard) -> None:
    base = server.url.partition("?")[0]
    with httpx.Client(base_url=base) as client:
        page = client.get(server.url)
        assert page.status_code == 200
        assert "HttpOnly; SameSite=Strict" in page.headers["Set-Cookie"]
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
            assert client.get(name).status_code == 200
        assert [one["name"] for one in client.get("api/runs").json()] == ["first"]
        assert client.get("api/metrics", params={"run": "first"}).json()["steps"] == [0, 1, 2, 3, 4]


def test_requests_without_the_token_are_refused(server: Dashboard) -> None:
    base, token = server.url.split("?token=")
    for path in ("", "main.js", "api/runs", "api/episodes?run=first"):
        assert httpx.get(base + path).status_code == 401
        wrong = httpx.get(base + path, headers={"Cookie": f"agentkit_{server.port}=wrong"})
        assert wrong.status_code == 401
    assert httpx.get(f"{base}api/runs?token={token}").status_code == 401  # only the page takes it from the address
    assert httpx.get(f"{base}api/runs", headers={"Authorization": f"Bearer {token}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "example.org"},
        {"Host": "127.0.0.1.example.org"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://example.org"},
        {"Origin": "null"},
    ],
)
def test_requests_from_elsewhere_are_refused(server: Dashboard, headers: dict[str, str]) -> None:
    base, token = server.url.split("?token=")
    allowed = {"Authorization": f"Bearer {token}"}
    assert httpx.get(f"{base}api/runs", headers=allowed).status_code == 200
    assert httpx.get(f"{base}api/runs", headers=allowed | headers).status_code == 403


def test_a_new_run_appears(run: Path) -> None:
    answers = Answers([run.parent])
    assert [one["name"] for one in json.loads(answers.answer("runs", {}))] == ["first"]
    make_run(run.parent / "second", done=0).release()
    found: list[str] = []
    for _ in range(200):
        found = [one["name"] for one in json.loads(answers.answer("runs", {}))]
        if len(found) > 1:
            break
        time.sleep(0.05)
    assert found == ["first", "second"]


def test_names_are_never_paths(server: Dashboard) -> None:
    base, token = server.url.split("?token=")
    headers = {"Authorization": f"Bearer {token}"}
    for path in ("../queries.py", "%2e%2e/queries.py", "/etc/passwd", "vendor/", "api/unknown"):
        assert httpx.get(base + path, headers=headers).status_code == 404
    for asked in ({"run": "../first"}, {"run": "first", "id": "x"}, {"run": "first", "id": "999"}, {}):
        answer = httpx.get(f"{base}api/episode", params=asked, headers=headers)
        assert answer.status_code == 404
        assert answer.json()["error"]


def test_only_reading_is_possible_and_the_token_can_be_left_out(run: Path) -> None:
    with Dashboard([run], port=0, token=False) as server:
        assert httpx.get(f"{server.url}api/runs").status_code == 200
        assert httpx.post(f"{server.url}api/runs").status_code == 403
        with pytest.raises(ConfigError, match="choose another"):
            Dashboard([run], port=server.port)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-u", "-m", "agentkit", "dashboard", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[0]
            assert httpx.get(url, timeout=30).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
        finally:
            process.kill()


# --- static copy


def test_a_copy_contains_the_answers(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    result = CliRunner().invoke(app, ["dashboard", str(run), "--export", str(folder), "--episodes", "2"])
    assert result.exit_code == 0, result.output
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    newest = {
        row.id
        for ending in ("eval", "trained")
        for row in records.list_episodes(run / "episodes.sqlite", Filter(ending=ending), last=2)
    }
    assert {f"data/0/episode-{number}.js" for number in newest} == {file for file in files if "/episode-" in file}
    answers = Answers([run])
    script = (folder / "data/0/metrics.js").read_text()
    assert script.startswith('agentkitCopy.answers["data/0/metrics.js"] = ')
    assert json.loads(script.split(" = ", 1)[1].rstrip(";\n")) == json.loads(
        answers.answer("metrics", {"run": "first"})
    )
    assert "vendor/uplot/LICENSE" in files
    assert "import " not in (folder / "page.js").read_text().replace("@import", "")
    with pytest.raises(ConfigError, match="not empty"):
        export([run], folder)


def test_modules_can_be_joined() -> None:
    """Names at the top of all modules are different, and each import names what its module exports."""
    modules = {
        name: content.decode() for name, content in static_files().items() if name.endswith(".js") and "/" not in name
    }
    names = [
        name
        for content in modules.values()
        for name in re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", content, re.MULTILINE)
    ]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    for content in modules.values():
        for imported, module in re.findall(r'^import \{ ([^}]*) \} from "\./([\w.]+)";$', content, re.MULTILINE):
            for name in imported.split(", "):
                assert re.search(
                    rf"^export (?:async )?(?:function|class|const|let) {name}\b", modules[module], re.MULTILINE
                )
    script = joined(modules)
    assert not re.search(r"^(?:import|export) ", script, re.MULTILINE)
    assert all(f"class {name}" in script for name in ("Overview", "Episodes", "Episode", "Chart"))
