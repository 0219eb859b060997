"""The dashboard's view of sandboxes, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser
from dashboard_runs import HOSTILE, STARTED, make_run, make_sandbox_run

from agentkit.dashboard.export import export
from agentkit.dashboard.server import Dashboard
from agentkit.jsonl import JsonlWriter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROWS = "[...document.querySelectorAll('.rows tbody tr')].map(e => e.querySelector('td').innerText)"
CHARTS = "document.querySelectorAll('.chart:not([hidden]) canvas').length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sandboxes") / "runs"
    make_sandbox_run(folder / "faults").release()
    make_sandbox_run(folder / "hostile", text=HOSTILE).release()
    make_run(folder / "none", done=0).release()
    make_sandbox_run(folder / "damaged").release()
    (folder / "damaged" / "episodes.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4096))
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with Dashboard([runs], port=0) as server:
        yield server.url


def fill(browser: Browser, label: str, value: str, event: str) -> None:
    """Set a field of the view's bar."""
    field = f"document.querySelector('[aria-label={label}]')"
    browser.evaluate(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event({event!r}))")


def test_hosts_and_sandboxes_with_their_failures(browser: Browser, address: str) -> None:
    browser.visit(address, "sandboxes?run=faults", f"{ROWS}.length == 4")
    shown = browser.text(".facts").replace("\n", " ")
    assert "2 busy, 1 idle, – being created, – set aside" in shown  # what was not recorded is not 0
    assert "5, 2 won by the second attempt" in shown
    hosts = browser.evaluate("[...document.querySelectorAll('.grid')][0].innerText")
    assert "50 %\t25 %" in hosts
    assert "no route to host" in hosts
    assert browser.evaluate(ROWS) == ["ak-2", "ak-1", "ak-4", "ak-3"]
    fill(browser, "Failure", "memory", "change")
    assert browser.evaluate(ROWS) == ["ak-1"]
    assert "kind=memory" in browser.evaluate("location.hash")
    fill(browser, "Failure", "", "change")
    fill(browser, "Find", "two", "input")
    assert browser.evaluate(ROWS) == ["ak-2", "ak-4"]


def test_a_sandbox_leads_to_its_episodes_and_back(browser: Browser, address: str) -> None:
    browser.visit(address, "sandboxes?run=faults", f"{ROWS}.length == 4")
    for key in ("j", "j", "Enter"):
        browser.press(key)
    browser.wait("document.querySelector('.box')")
    assert "box=ak-1" in browser.evaluate("location.hash")
    shown = browser.text(".box")
    assert "3 by standby, 1 by new" in shown
    assert "oom: its memory limit killed its main process." in shown
    assert browser.evaluate("document.querySelectorAll('.box tbody tr').length") == 3
    assert browser.evaluate("[...document.querySelectorAll('.served a')].map(e => e.innerText)") == ["1", "2"]
    browser.evaluate("document.querySelectorAll('.served a')[1].click()")
    browser.wait("document.querySelector('h1').innerText == 'Episode 2'")
    links = "[...document.querySelectorAll('.facts a')].filter(e => e.innerText.startsWith('ak-'))"
    assert browser.evaluate(f"{links}.map(e => e.innerText)") == ["ak-1", "ak-4"]
    browser.evaluate(f"{links}[1].click()")
    browser.wait("document.querySelector('.box h2')?.innerText == 'ak-4'")


def test_the_history_and_the_curves(browser: Browser, address: str) -> None:
    browser.visit(address, "sandboxes?run=faults", f"{ROWS}.length == 4")
    browser.press("2")
    browser.wait(f"{ROWS}.length == 9")
    last, first = browser.evaluate("[...document.querySelectorAll('.rows tbody tr')].map(e => e.innerText)")[::8]
    assert "too many to record" in last
    assert first.split("\t")[1:] == ["one", "ak-1", "failed", "oom", "–", "–"]
    title = browser.evaluate("[...document.querySelectorAll('.rows tbody tr')].at(-1).querySelector('[title]').title")
    assert title == "its memory limit killed its main process"
    browser.press("3")
    browser.wait(f"{CHARTS} > 5")
    titles = browser.evaluate("[...document.querySelectorAll('.chart:not([hidden]) figcaption')].map(e => e.innerText)")
    assert "Sandboxes by state" in titles
    assert "Memory in use by host" in titles


def test_a_run_in_progress_is_followed(browser: Browser, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "live", steps=9, done=1)
    with Dashboard([tmp_path], port=0) as server:
        browser.visit(server.url, "sandboxes", "document.body.innerText.includes('has had no sandbox')")
        writer = JsonlWriter(directory.events_file)
        writer.write(
            {
                "event": "sandbox_lost",
                "time": STARTED,
                "sandbox": "ak-9",
                "host": "here",
                "cause": "hung",
                "in_use": True,
            }
        )
        writer.close()
        browser.wait(f"{ROWS}.length == 1 && {ROWS}[0] == 'ak-9'")
        directory.release()


def test_runs_without_sandboxes_and_damaged_ones(browser: Browser, address: str) -> None:
    for tab, text in (
        ("", "No sandbox has served"),
        ("history", "Nothing has failed"),
        ("curves", "no metrics of sandboxes"),
    ):
        place = f"sandboxes?run=none&tab={tab}"
        browser.visit(address, place, f"document.querySelector('main').innerText.includes({text!r})")
    browser.visit(address, "sandboxes?run=damaged", "document.querySelector('.wrong')")
    assert "episodes.sqlite cannot be read" in browser.text()


def test_hostile_texts_are_shown_as_text(browser: Browser, address: str) -> None:
    for tab in ("", "history"):
        browser.visit(
            address,
            f"sandboxes?run=hostile&tab={tab}&q=<img src=x onerror='attacked=1'>",
            "document.querySelector('.facts')",
        )
        browser.visit(address, f"sandboxes?run=hostile&tab={tab}", f"{ROWS}.length")
        assert browser.evaluate("typeof attacked") == "undefined"
        assert browser.evaluate("document.querySelectorAll('main script, main img').length") == 0
        assert "<script>window.attacked = 1</script>" in browser.text()
        assert not set(browser.evaluate("document.querySelector('main').innerHTML")) & set("\x1b\x07\u202e\u2028")


def test_a_copy_has_the_view(browser: Browser, runs: Path, tmp_path: Path) -> None:
    export([runs], tmp_path / "copy", episodes=3)
    copy = (tmp_path / "copy" / "index.html").as_uri()
    browser.visit(copy, "sandboxes?run=faults&box=ak-1", "document.querySelectorAll('.served a').length == 2")
    browser.evaluate("document.querySelectorAll('.served a')[0].click()")
    browser.wait("document.querySelector('h1').innerText == 'Episode 1'")


def test_keys_lead_to_the_view_and_both_themes_and_small_windows_show_it(browser: Browser, address: str) -> None:
    for theme, width in (("light", 1440), ("dark", 500)):
        browser.look(width, 900, theme)
        browser.visit(address, "episodes?run=faults", "document.querySelector('.window .row')")
        browser.press("s")
        browser.wait(f"{ROWS}.length == 4")
        assert "run=faults" in browser.evaluate("location.hash")
        for tab in ("", "history", "curves"):
            browser.visit(address, f"sandboxes?run=faults&tab={tab}", f"{ROWS}.length || {CHARTS}")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.look(1440, 900)
