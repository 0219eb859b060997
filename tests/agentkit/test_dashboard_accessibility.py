"""Each view of the dashboard, in both themes, has no serious defect of accessibility according to axe-core."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser
from dashboard_runs import episode, make_pipeline_run, make_run, make_sandbox_run, turn
from requiring import require

from agentkit import records
from agentkit.alerts import BEGAN, Alert
from agentkit.dashboard.server import Dashboard
from agentkit.store import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERIOUS = {"critical", "serious"}
TOKENS = "episode?run=first&id={shown}&part=tokens"
VIEWS = {
    "overview?run=first&run=pipeline": "document.querySelector('.chart canvas')",
    "overview?run=first&run=pipeline&tab=evaluation": "document.querySelector('.evaluations')",
    "overview?run=first&run=pipeline&tab=settings": "document.querySelector('.settings')",
    "overview?run=alerted&tab=alerts": "document.querySelector('.alertlist')",
    "episodes?run=first": "document.querySelector('.window .row')",
    "episodes?run=first&error=nothing": "document.querySelector('.empty')",
    "episode?run=first&id={shown}": "document.querySelector('article.turn')",
    "episode?run=first&id={shown}&part=group": "document.querySelector('.member')",
    TOKENS: "document.querySelector('.token')",
    f"{TOKENS}&colour=version": "document.querySelector('.token')",
    f"{TOKENS}&colour=advantage": "document.querySelector('.token')",
    f"{TOKENS}&colour=weight": "document.querySelector('.token')",
    "pipeline?run=pipeline": "document.querySelector('canvas')",
    "pipeline?run=pipeline&tab=gate": "document.querySelector('main').innerText.includes('Staleness')",
    "pipeline?run=pipeline&tab=roles": "document.querySelector('.grid')",
    "sandboxes?run=sandboxes": "document.querySelector('.rows')",
    "sandboxes?run=sandboxes&box=ak-1": "document.querySelector('.box')",
    "sandboxes?run=sandboxes&tab=history": "document.querySelector('.rows')",
    "sandboxes?run=sandboxes&tab=curves": "document.querySelector('canvas')",
}
DEFECTS = """
    const button = document.createElement("button");
    const faint = document.createElement("p");
    faint.textContent = "hardly visible";
    faint.style.color = "#888";
    faint.style.background = "#999";
    document.querySelector("main").append(button, faint);
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accessible") / "runs"
    make_pipeline_run(folder / "pipeline").release()
    make_sandbox_run(folder / "sandboxes").release()
    alerted = make_run(folder / "alerted")
    with Recorder(alerted) as recorder:
        recorder.event(BEGAN, **asdict(Alert("aborts", "episodes", 3, "9 % were lost", "a fault", "read `show`")))
    alerted.release()
    first = make_run(folder / "first", settings=["env.max_turns=9"])
    with Recorder(first) as recorder:
        for member, reward in enumerate((0.0, 1.0)):
            unlikely = turn("one two three four five six", reward)
            unlikely = replace(unlikely, action_logprobs=np.linspace(-0.01, -9.0, 7, dtype=np.float32))
            recorder.episode(5, episode(90, member, reward, turns=[unlikely, unlikely]), "trained")
    first.release()
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with Dashboard([runs], port=0) as server:
        yield server.url


@pytest.fixture(scope="module")
def axe() -> str:
    require("axe_playwright_python", "pip install --no-deps axe-playwright-python")
    return resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()


def defects(browser: Browser, axe: str) -> list[str]:
    """Return the serious defects of the page that is open."""
    browser.evaluate(axe)
    browser.evaluate(
        "window.defects = undefined;"
        "axe.run(document, {resultTypes: ['violations']}).then(found => { window.defects = found.violations; })"
    )
    browser.wait("window.defects")
    found = json.loads(
        browser.evaluate(
            "JSON.stringify(window.defects.map(one => "
            "[one.impact, one.id, one.nodes.map(node => `${node.target}: ${node.failureSummary}`)]))"
        )
    )
    return [f"{id}: {place}" for impact, id, places in found if impact in SERIOUS for place in places]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_view_has_a_serious_defect(browser: Browser, address: str, runs: Path, axe: str, theme: str) -> None:
    shown = records.list_episodes(runs / "first" / "episodes.sqlite", records.Filter(step=5))[-1].id
    found = {}
    for width in (1440, 500):
        browser.look(width, 900, theme)
        for place, there in VIEWS.items():
            browser.visit(address, place.format(shown=shown), there)
            found[place, width] = defects(browser, axe)
    browser.press("?")
    browser.wait("document.querySelector('dialog').open")
    found["keys", width] = defects(browser, axe)
    assert {place: some for place, some in found.items() if some} == {}


def test_serious_defects_are_found(browser: Browser, address: str, axe: str) -> None:
    browser.visit(address, "episodes?run=first", "document.querySelector('.window .row')")
    browser.evaluate(DEFECTS)
    assert {one.partition(":")[0] for one in defects(browser, axe)} == {"button-name", "color-contrast"}
