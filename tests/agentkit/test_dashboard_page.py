"""The dashboard's page in a real browser."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from dashboard_runs import HOSTILE, episode, make_run, turn

from agentkit import records
from agentkit.alerts import BEGAN, ENDED, Alert
from agentkit.dashboard.episode_page import write_episode_page
from agentkit.dashboard.export import export
from agentkit.dashboard.server import Dashboard
from agentkit.records import Filter
from agentkit.store import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
FILTER = """(() => {
    const field = document.querySelector("input[aria-label=Return]"), began = performance.now();
    field.value = %s;
    field.dispatchEvent(new Event("input"));
    return performance.now() - began;
})()"""
SORT = """(() => {
    const began = performance.now();
    document.querySelector(".head .c-reward").click();
    return performance.now() - began;
})()"""

POINT_AT_LAST = """[...document.querySelectorAll(".token:not(.prompt)")].at(-1)
    .dispatchEvent(new Event("mouseover", {bubbles: true}))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    for seed in range(3):
        make_run(folder / f"first-{seed}", seed=seed).release()
    make_run(folder / "other", settings=["learner.lr=0.5"]).release()
    hostile = make_run(folder / "hostile", done=0)
    with Recorder(hostile) as recorder:
        recorder.episode(1, episode(0, 0, 0.0, turns=[turn(HOSTILE, observation=HOSTILE)]), "trained")
        long = episode(1, 0, 0.0, turns=[turn("short", observation="<b>" + "x" * 1_000_000)])
        recorder.episode(1, replace(long, outcome="voided", reason=HOSTILE), "voided", HOSTILE)
    hostile.release()
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with Dashboard([runs], port=0) as server:
        yield server.url


def ids(runs: Path, run: str, **wanted: Any) -> list[int]:
    return [row.id for row in records.list_episodes(runs / run / "episodes.sqlite", Filter(**wanted))]


def test_the_overview_shows_runs_curves_evaluations_and_settings(
    browser: Browser, address: str, tmp_path: Path
) -> None:
    browser.visit(address, "overview?run=first-0&run=other", "document.querySelectorAll('.chart canvas').length > 3")
    assert browser.evaluate("location.search") == ""  # the token does not stay in the address
    assert "Runs (5)" in browser.text()
    assert "75.0 %" in browser.text("tr[data-run='first-0']")
    assert "4 / 4" in browser.text("tr[data-run='first-0']")
    browser.evaluate("document.querySelector('input.wide').value = 'entropy'")
    browser.evaluate("document.querySelector('input.wide').dispatchEvent(new Event('input'))")
    assert browser.evaluate("[...document.querySelectorAll('.chart figcaption')].map(e => e.innerText)") == [
        "policy/entropy"
    ]
    assert "q=entropy" in browser.evaluate("location.hash")
    browser.evaluate("[...document.querySelectorAll('.tabs button')][1].click()")
    browser.wait("document.querySelectorAll('.evaluations tbody tr').length == 4")
    assert "40.9 % – 92.9 %" in browser.text(".evaluations")  # Wilson, 6 of 8
    browser.evaluate("[...document.querySelectorAll('.tabs button')][2].click()")
    browser.wait("document.querySelector('.settings')")
    shown = browser.evaluate("[...document.querySelectorAll('.settings tbody tr')].map(e => e.innerText)")
    assert shown == ["learner.lr\t0.0003\t0.5"] or (len(shown) == 1 and shown[0].endswith("0.5"))
    browser.screenshot(tmp_path / "settings.png")


def test_seeds_become_one_band(browser: Browser, address: str) -> None:
    chosen = "&".join(f"run=first-{seed}" for seed in range(3))
    place = f"overview?{chosen}&run=other&q=rollout/success&smooth=0"
    colours = "new Set([...document.querySelectorAll('tr.on .dot')].map(e => e.style.background)).size"
    browser.visit(address, place, "document.querySelector('.chart canvas')")
    assert browser.evaluate(colours) == 4
    browser.visit(address, f"{place}&seeds=band", "document.querySelector('.chart canvas')")
    assert browser.evaluate(colours) == 2


def test_the_page_follows_a_run(browser: Browser, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "live", steps=9, done=2)
    with Dashboard([tmp_path], port=0) as server:
        browser.visit(server.url, "overview", "document.body.innerText.includes('2 / 9')")
        assert "1 running" in browser.text(".status")
        with Recorder(directory) as recorder:
            recorder.episode(3, episode(9, 0, 1.0), "trained")
            recorder.metrics(3, {"rollout/success": 0.5})
        browser.wait("document.body.innerText.includes('3 / 9')")
        directory.release()
        browser.wait("document.body.innerText.includes('interrupted')")
    browser.wait("document.body.innerText.includes('the server does not answer')")


def test_alerts_are_listed_with_their_steps(browser: Browser, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "runs" / "alerted", steps=10, done=6)
    make_run(tmp_path / "runs" / "calm").release()
    slow = Alert("slow_phase", "time/train", 2, "training took 70 s", "busy", "look at `top`")
    lost = Alert("aborts", "episodes", 3, "9 % of the episodes were lost", f"a fault: {HOSTILE}", "read the errors")
    with Recorder(directory) as recorder, Dashboard([tmp_path / "runs"], port=0) as server:
        recorder.event(BEGAN, **asdict(slow))
        recorder.event(BEGAN, **asdict(lost))
        recorder.event(ENDED, name=slow.name, subject=slow.subject, step=5, began=slow.step)
        recorder.flush()
        browser.visit(server.url, "overview?run=alerted&run=calm&tab=alerts", "document.querySelector('.alertlist')")
        rows = browser.evaluate("[...document.querySelectorAll('.alertlist tbody tr')].map(e => e.innerText)")
        assert [[part.strip() for part in row.split("\t")[1:4]] for row in rows] == [
            ["alerted", "Aborts\nepisodes", "3 to now"],
            ["alerted", "Slow phase\ntime/train", "2 to 5"],
        ]
        assert all(part in rows[0] for part in (lost.text, "Cause: a fault: <script>", "Remedy: read the errors"))
        assert browser.evaluate("document.querySelector('.alertlist code').innerText") == "top"
        assert browser.evaluate("window.attacked") is None
        assert browser.evaluate("[...document.querySelectorAll('.tabs button')].at(-1).innerText") == "Alerts (1)"
        assert browser.text("tr[data-run='alerted'] .alerts") == "1 alert"
        assert browser.text("tr[data-run='calm'] .alerts") is None
        browser.screenshot(tmp_path / "alerts.png")
        recorder.event(ENDED, name=lost.name, subject=lost.subject, step=6, began=lost.step)
        recorder.flush()
        # The page follows the run.
        browser.wait("!document.querySelector('.alerts')")
        browser.wait("document.querySelector('.alertlist').innerText.includes('3 to 6')")
        browser.evaluate("document.querySelector('.alertlist a').click()")
        browser.wait("document.querySelectorAll('.window .row').length == 6")
        assert "step=3" in browser.evaluate("location.hash")
        browser.visit(server.url, "overview?run=calm&tab=alerts", "document.querySelector('.empty')")
        assert "have had no alert" in browser.text()
    directory.release()


def test_episodes_are_filtered_sorted_and_opened_with_keys(browser: Browser, address: str, runs: Path) -> None:
    rows = "[...document.querySelectorAll('.window .row')].map(e => Number(e.firstChild.innerText))"
    solved = [id for id in ids(runs, "first-0", ending="trained") if id in ids(runs, "first-0", min_reward=1.0)]
    browser.visit(address, "episodes?run=first-0&ending=trained&reward=1..", f"{rows}.length > 0")
    assert browser.evaluate(rows) == solved[::-1]
    browser.evaluate("document.querySelector('.head .c-id').click()")
    assert browser.evaluate(rows) == solved
    assert "order=up" in browser.evaluate("location.hash")
    for key in "jj":
        browser.press(key)
    browser.press("Enter")
    browser.wait("document.querySelector('article.turn')")
    assert f"Episode {solved[1]}" in browser.text()
    browser.press("n")
    browser.wait(f"document.querySelector('h1').innerText == 'Episode {solved[2]}'")
    browser.press("Escape")
    browser.wait("document.querySelector('.list')")
    browser.visit(address, "episodes?run=first-0&error=crashed", f"{rows}.length > 0")
    assert browser.evaluate(rows) == ids(runs, "first-0", outcome="voided")[::-1]


def test_an_episode_its_tokens_and_its_group(browser: Browser, address: str, runs: Path) -> None:
    shown = ids(runs, "first-0", ending="trained", step=2)[1]  # the solved member of three
    browser.visit(address, f"episode?run=first-0&id={shown}", "document.querySelector('article.turn')")
    assert [line for line in browser.text("article.turn:last-of-type").split("\n") if "reward" in line] == ["reward 1"]
    assert "executed Right" in browser.text("article.turn:last-of-type").replace("\n", " ")
    assert "generation 600 ms" in browser.text(".legend")
    browser.press("2")
    browser.wait("document.querySelectorAll('.token').length > 5")
    browser.evaluate(POINT_AT_LAST)
    detail = browser.text(".detail")
    assert "-1 (36.8 %)" in detail
    assert "1.155" in detail  # (1 - 1/3) / std of 0, 1, 0
    browser.press("3")
    browser.wait("document.querySelectorAll('.member').length == 3")
    assert browser.evaluate("[...document.querySelectorAll('.different mark')].map(e => e.innerText)") == [
        "Left 0",
        "Left 2",
    ]
    browser.visit(
        address,
        f"episode?run=first-0&id={shown + 1}&part=group",
        "document.querySelectorAll('.member').length == 3",
    )
    assert browser.evaluate("[...document.querySelectorAll('.different mark')].map(e => e.innerText)") == ["0", "Right"]


def test_hostile_text_is_shown_as_text(browser: Browser, address: str, runs: Path) -> None:
    first, second = ids(runs, "hostile")[-2:]
    for place in (
        f"episode?run=hostile&id={first}",
        f"episode?run=hostile&id={first}&part=tokens",
        f"episode?run=hostile&id={first}&part=group",
        f"episode?run=hostile&id={second}",
        "episodes?run=hostile",
        "overview?run=<script>attacked=1</script>&q=<img src=x onerror='attacked=1'>",
    ):
        browser.visit(address, place, "document.querySelector('article.turn, .token, .member, .window .row, .runs tr')")
        time.sleep(0.3)
        assert browser.evaluate("typeof attacked") == "undefined"
        assert browser.evaluate("document.querySelectorAll('main script, main img, main b').length") == 0
    browser.visit(address, f"episode?run=hostile&id={first}", "document.querySelector('article.turn')")
    answer = browser.text(".assistant pre")
    assert "<script>window.attacked = 1</script>" in answer
    for escape in ("\\x1b]0;title\\x07", "\\x1b[2J", "\\u202ereversed\\u202c", "\\ud800", "\\u2028"):
        assert escape in answer
    assert not set(answer) & set("\x1b\x07\u202e\u202c\u2028")
    browser.visit(address, f"episode?run=hostile&id={second}", "document.querySelector('button.more')")
    assert "Show all 1,000,003 characters" in browser.text()
    browser.evaluate("document.querySelector('button.more').click()")
    browser.wait("document.querySelector('.user pre').textContent.length == 1000003")


def test_a_copy_opens_from_a_file(browser: Browser, runs: Path, tmp_path: Path) -> None:
    export([runs], tmp_path / "copy", episodes=3)
    address = (tmp_path / "copy" / "index.html").as_uri()
    kept, left_out = ids(runs, "first-0", ending="trained")[-2], ids(runs, "first-0", ending="trained")[0]
    browser.visit(address, "overview?run=first-0", "document.querySelectorAll('.chart canvas').length > 3")
    assert "static copy" in browser.text(".status")
    browser.visit(
        address,
        "episodes?run=first-0&ending=trained",
        "document.querySelectorAll('.window .row').length == 24",
    )
    browser.visit(
        address,
        f"episode?run=first-0&id={kept}&part=group",
        "document.querySelectorAll('.member').length == 3",
    )
    browser.visit(address, f"episode?run=first-0&id={kept}&part=tokens", "document.querySelector('.token')")
    browser.visit(address, f"episode?run=first-0&id={left_out}", "document.querySelector('.wrong')")
    assert "does not contain it" in browser.text()


def test_one_episode_is_one_file(browser: Browser, runs: Path, tmp_path: Path) -> None:
    shown = ids(runs, "first-0", ending="trained", step=2)[1]
    file = tmp_path / "episode.html"
    write_episode_page(runs / "first-0", shown, file)
    browser.visit(file.as_uri(), "", "document.querySelector('article.turn')")
    assert browser.text("h1") == f"Episode {shown}"
    assert browser.evaluate("document.querySelectorAll('header a[href], .bar a[href]').length") == 0, (
        "nothing else is there"
    )
    browser.press("2")
    browser.wait("document.querySelectorAll('.token').length > 5")
    browser.evaluate(POINT_AT_LAST)
    assert "1.155" in browser.text(".detail")  # the advantage
    for key in "oegs":
        browser.press(key)
    browser.press("3")
    browser.wait("document.querySelectorAll('.member').length == 3")
    browser.evaluate("document.querySelector('.member:not(.self) a').click()")
    browser.wait(f"document.querySelector('h1').innerText != 'Episode {shown}'")
    assert browser.evaluate("document.querySelectorAll('.member').length") == 3
    loaded = browser.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == []


def test_hostile_text_is_text_in_one_file(browser: Browser, runs: Path, tmp_path: Path) -> None:
    first = ids(runs, "hostile")[-2]
    file = tmp_path / "</script><script>window.attacked = 3.html".replace("/", "")
    write_episode_page(runs / "hostile", first, file)
    for part in ("", "tokens", "group"):
        browser.visit(file.as_uri(), f"episode?run=hostile&id={first}&part={part}", "document.querySelector('.body *')")
        assert browser.evaluate("typeof attacked") == "undefined"
        assert browser.evaluate("document.querySelectorAll('main script, main img, main b').length") == 0
    browser.visit(file.as_uri(), f"episode?run=hostile&id={first}", "document.querySelector('article.turn')")
    assert "<script>window.attacked = 1</script>" in browser.text(".assistant pre")
    # The policy stops scripts that would be in the page.
    browser.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'attacked = 4'}))")
    assert browser.evaluate("typeof attacked") == "undefined"


def test_100000_episodes(browser: Browser, tmp_path: Path) -> None:
    """First paint within a second, and each filter within 0.3 seconds; the best of three, as machines are shared."""
    directory = make_run(tmp_path / "large", steps=1000, done=1)
    directory.release()
    with sqlite3.connect(directory.episodes_file) as db:
        others = [row[1] for row in db.execute("pragma table_info(episodes)") if row[1] not in ("id", "step", "reward")]
        copied = ", ".join(others)
        db.execute(
            "with recursive numbers(n) as (select 1 union all select n + 1 from numbers where n < 100000) "
            f"insert into episodes (step, reward, {copied}) select n / 100, n % 997, {copied} "
            "from numbers, episodes where episodes.id = 12"
        )
    db.close()
    paints, loads, filters = [], [], []
    with Dashboard([directory.path], port=0) as server:
        for _ in range(3):
            browser.open("about:blank")
            began = time.monotonic()
            browser.open(f"{server.url}#/episodes?run=large")
            browser.wait("document.querySelectorAll('.window .row').length > 10")
            loads.append(time.monotonic() - began)
            paints.append(browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        assert re.search(r"100,0\d\d of 100,0\d\d", browser.text())
        for value in ("1..900", "", "2..900", ""):
            filters.append(browser.evaluate(FILTER % json.dumps(value)))
        filters.append(browser.evaluate(SORT))
    print(f"first paint {min(paints):.0f} ms, table {min(loads):.2f} s, filters {[round(one) for one in filters]} ms")
    assert min(paints) < 1000
    assert max(min(filters[0], filters[2]), min(filters[1], filters[3])) < 300
    assert filters[-1] < 1000


def test_both_themes_and_a_narrow_window(browser: Browser, address: str, tmp_path: Path) -> None:
    for theme, dark in (("light", False), ("dark", True)):
        browser.look(1440, 900, theme)
        browser.visit(address, "overview", "document.querySelector('.chart canvas')")
        colour = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, colour[4:-1].split(","))) < 200) == dark
        browser.press("t")
        assert browser.evaluate("document.documentElement.dataset.theme") == "light"
        browser.press("t")
        browser.press("t")
    browser.look(500, 900)
    browser.visit(address, "overview", "document.querySelector('.chart canvas')")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 500
    browser.look(1440, 900)
