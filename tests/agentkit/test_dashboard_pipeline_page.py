"""The dashboard's view of learner, engines and gate, in a real browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser
from dashboard_runs import HOSTILE, episode, make_pipeline_run, make_run

from agentkit import records
from agentkit.dashboard.export import export
from agentkit.dashboard.server import Dashboard
from agentkit.records import Filter
from agentkit.store import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LANES = "document.querySelectorAll('.lanes a.run').length"
CHARTS = "document.querySelectorAll('.chart:not([hidden]) canvas').length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "runs"
    make_pipeline_run(folder / "finished").release()
    make_pipeline_run(folder / "hostile", text=HOSTILE).release()
    make_run(folder / "empty", done=0).release()
    make_pipeline_run(folder / "damaged").release()
    (folder / "damaged" / "episodes.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with Dashboard([runs], port=0) as server:
        yield server.url


def widths(browser: Browser, selector: str) -> list[float]:
    """Return the widths of elements in percent of their track."""
    return browser.evaluate(f"[...document.querySelectorAll({selector!r})].map(e => parseFloat(e.style.width))")


def test_the_timeline_of_a_finished_run(browser: Browser, address: str, runs: Path) -> None:
    browser.visit(address, "pipeline?run=finished", f"{LANES} == 4 && {CHARTS} == 4")
    assert "waits for episodes in 25 % of its time" in browser.text(".verdict")
    # 14 s: three steps of 4 s, and 2 s between the second and the third.
    assert widths(browser, ".piece.training") == pytest.approx([100 * 2 / 14] * 3, abs=0.001)
    assert widths(browser, ".piece.waiting") == pytest.approx([100 * 1 / 14] * 3, abs=0.001)
    assert browser.evaluate("[...document.querySelectorAll('.mark')].map(e => e.title)") == [
        "engine 2 was lost: hangs",
        "resumed after step 1",
        "engine 1 was lost: it did not answer",
        "step 3 had no signal: all returns are equal",
    ]
    assert browser.text(".piece.number.here") == "3"
    browser.press("ArrowLeft")
    browser.wait("document.querySelector('.piece.number.here').innerText == '2'")
    assert "step=2" in browser.evaluate("location.hash")
    assert browser.evaluate(LANES) == 4
    title = browser.evaluate("document.querySelector('.lanes a.run').title")
    first = records.list_episodes(runs / "finished" / "episodes.sqlite", Filter(ending="trained", step=2))[0].id
    assert title == (
        f"episode {first}, group 2, trained: generation 1.5 s, environment 750 ms, waiting 750 ms, "
        "then 1.0 s until its step"
    )
    browser.evaluate("document.querySelector('.lanes a.run').click()")
    browser.wait(f"document.querySelector('h1').innerText == 'Episode {first}'")


def test_the_window_of_the_timeline_is_in_the_address(browser: Browser, address: str) -> None:
    browser.visit(address, "pipeline?run=finished&steps=1..2&step=1", f"{LANES} == 4")
    assert widths(browser, ".piece.training") == pytest.approx([25.0] * 2)
    browser.press("j")
    browser.press("j")
    browser.wait("document.querySelector('.piece.number.here').innerText == '3'")
    assert "steps=2..3" in browser.evaluate("location.hash")


def test_the_gate_and_the_engines(browser: Browser, address: str) -> None:
    browser.visit(address, "pipeline?run=finished", CHARTS)
    browser.press("2")
    browser.wait("document.querySelector('main').innerText.includes('Groups with equal returns')")
    shown = browser.text()
    assert "3 running, 1 complete" in shown
    assert "4 of 7 groups: in 1 every episode succeeded, in 3 none." in shown
    rows = browser.evaluate("[...document.querySelectorAll('.grid tbody tr')].map(e => e.innerText)")
    assert rows[:3] == ["0\t50.0 %\t", "1\t33.3 %\t", "2\t16.7 %\t"]
    assert browser.text(".silent") == "step 3 had no signal: all returns are equal"
    assert rows[4] == "dropped\tzero_signal\t2\t13.3 %\t5\t2.0 s"
    browser.press("3")
    browser.wait("document.querySelector('main').innerText.includes('Nodes')")
    rows = browser.evaluate("[...document.querySelectorAll('.grid tbody tr')].map(e => e.innerText)")
    assert rows[0] == "0\tserving\t30\t60.0 %\t50.0 %\t2\t3\t0\t0"
    assert rows[1].startswith("1\treplaced")
    assert "it did not answer" in rows[1]
    assert "second\tengine × 1\t–" in rows
    assert "third:8765\t\t5" in rows


def test_a_run_in_progress_is_followed(browser: Browser, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "live", steps=9, done=0)
    with Dashboard([tmp_path], port=0) as server:
        browser.visit(server.url, "pipeline", "document.body.innerText.includes('has not finished a training step')")
        with Recorder(directory) as recorder:
            made = episode(9, 0, 1.0)
            made.ended_at = time.time()
            recorder.episode(1, made, "trained")
            seconds = {"time/wait": 3.0, "time/train": 1.0, "time/publish": 0.0, "time/step": 4.0}
            recorder.metrics(1, {**seconds, "engine/busy_share": 0.5})
        browser.wait(f"{LANES} == 1 && document.querySelector('.verdict').innerText.includes('in 75 % of its time')")
        directory.release()


def test_runs_without_steps_and_damaged_ones(browser: Browser, address: str) -> None:
    for tab, text in (
        ("", "begins with the first training step"),
        ("gate", "No group was trained"),
        ("roles", "Known after"),
    ):
        place = f"pipeline?run=empty&tab={tab}"
        browser.visit(address, place, f"document.querySelector('main').innerText.includes({text!r})")
    browser.visit(address, "pipeline?run=damaged", "document.querySelector('.wrong')")
    assert "episodes.sqlite cannot be read" in browser.text()


def test_hostile_texts_of_events_are_shown_as_text(browser: Browser, address: str) -> None:
    for tab in ("", "gate", "roles"):
        browser.visit(address, f"pipeline?run=hostile&tab={tab}", CHARTS)
        assert browser.evaluate("typeof attacked") == "undefined"
        assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert "<script>window.attacked = 1</script>" in browser.text()
    assert "\\u202ereversed" in browser.text()
    assert not set(browser.evaluate("document.querySelector('main').innerHTML")) & set("\x1b\x07\u202e\u2028")


def test_a_copy_has_the_view(browser: Browser, runs: Path, tmp_path: Path) -> None:
    export([runs], tmp_path / "copy", episodes=1)
    copy = (tmp_path / "copy" / "index.html").as_uri()
    browser.visit(copy, "pipeline?run=finished&step=2", f"{LANES} == 4 && {CHARTS} == 4")
    browser.visit(copy, "pipeline?run=finished&tab=roles", "document.querySelector('.grid')")
    assert "replaced" in browser.text()


def test_keys_lead_to_the_view_and_both_themes_and_small_windows_show_it(browser: Browser, address: str) -> None:
    for theme, width in (("light", 1440), ("dark", 500)):
        browser.look(width, 900, theme)
        browser.visit(address, "episodes?run=finished", "document.querySelector('.window .row')")
        browser.press("g")
        browser.wait(f"{LANES} == 4 && {CHARTS}")
        assert "run=finished" in browser.evaluate("location.hash")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        for tab in ("gate", "roles"):
            browser.visit(address, f"pipeline?run=finished&tab={tab}", CHARTS)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.look(1440, 900)
