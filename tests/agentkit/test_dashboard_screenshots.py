"""The pictures of the dashboard in the README show the page as it is.

``DASHBOARD_SCREENSHOTS=docs/images pytest -m slow tests/agentkit/test_dashboard_screenshots.py`` draws them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser
from dashboard_runs import episode, make_pipeline_run, make_run, make_sandbox_run, turn
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from agentkit import records
from agentkit.dashboard.server import Dashboard
from agentkit.records import TokenCredit
from agentkit.run_directory import RunDirectory
from agentkit.store import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DRAWN = Path(os.environ.get("DASHBOARD_SCREENSHOTS", ""))
KEPT = Path("docs/images")
PICTURES = {
    "overview": (
        "overview?run=grpo/0&run=grpo/1&run=grpo/2&run=ppo",
        "document.querySelectorAll('.chart canvas').length > 3",
    ),
    "tokens": (
        "episode?run=ppo&id={tokens}&part=tokens&colour=advantage",
        "document.querySelectorAll('.largest li').length",
    ),
    "pipeline": ("pipeline?run=pipeline&step=2", "document.querySelectorAll('canvas').length > 3"),
    "sandboxes": ("sandboxes?run=sandboxes&box=ak-1", "document.querySelector('.box')"),
}
LARGEST_FILE = 100_000
STEPS = 40
ANSWERS = (
    "I am at the top left and the goal is three steps to the right, but there is a hole in between. Down",
    "The way along the edge is free. Right Right",
    "The goal is one step away. Right",
)


def make_training(path: Path, seed: int, best: float, settings: Sequence[str] = ()) -> RunDirectory:
    """Write a run of 40 steps whose success rises to ``best``.

    Returns:
        The directory, which is still locked; ``release`` it.
    """
    directory = make_run(path, seed=seed, steps=STEPS, done=0, settings=settings)
    rng = np.random.default_rng(seed)
    with Recorder(directory) as recorder:
        for step in range(1, STEPS + 1):
            success = best / (1 + np.exp((14 + seed - step) / 4)) + rng.normal(0, 0.02)
            recorder.episode(step, episode(step, 0, float(success > 0.5), version=step - 1), "trained")
            values = {"rollout/success": success, "rollout/return_mean": success - 0.1 * rng.random()}
            values |= {"policy/entropy": 1.4 - success + rng.normal(0, 0.03), "time/step": 6 + rng.random()}
            recorder.metrics(step, values | {"staleness/mean": 0.5, "rollout/tokens_mean": 90 - 30 * success})
            if step % 10 == 0:
                recorder.metrics(step, {"eval/success": success, "eval/return_mean": success})
        recorder.event("end", steps=STEPS, finished=True)
    return directory


def make_tokens(folder: Path) -> int:
    """Write a run with critics and a tokenizer; return the id of an episode whose tokens have credit."""
    words = sorted({word for answer in ANSWERS for word in re.findall(r"\S+\s*", answer)})
    words = ["<user>", "P _ _ G\n_ H _ _", "<assistant>", *words]
    directory = make_training(folder / "ppo", 0, 0.8, ["algorithm.advantage=gae", "critic={count: 2}"])
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<user>"))
    (directory.path / "tokenizer").mkdir()
    tokenizer.save(str(directory.path / "tokenizer" / "tokenizer.json"))
    rng, turns = np.random.default_rng(0), []
    for number, answer in enumerate(ANSWERS):
        ids = np.array([words.index(word) for word in re.findall(r"\S+\s*", answer)], np.int32)
        logprobs = -rng.exponential(0.4, len(ids)).astype(np.float32)
        made = replace(turn(answer, float(number == 2), "P _ _ G\n_ H _ _"), prompt_ids=np.arange(3, dtype=np.int32))
        turns.append(replace(made, action_ids=ids, action_logprobs=logprobs, versions=((39, len(ids)),)))
    with Recorder(directory) as recorder:
        played = replace(episode(900, 0, 1.0, turns=turns, version=39), success=True)
        count = played.num_action_tokens
        value = np.linspace(0.2, 0.9, count, dtype=np.float32) + rng.normal(0, 0.05, count).astype(np.float32)
        other = value + rng.normal(0, 0.08, count).astype(np.float32)
        advantage = 5 * np.append(np.diff(value), 1 - value[-1]).astype(np.float32)
        columns = {"advantage": advantage, "weight": np.ones(count, np.float32), "value_0": value, "value_1": other}
        columns["disagreement"] = np.abs(value - other) / 2
        recorder.episode(STEPS, played, "trained")
        recorder.credit([TokenCredit(STEPS, 900, 0, columns)])
    directory.release()
    return records.list_episodes(directory.episodes_file)[-1].id


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures") / "runs"
    for seed in range(3):
        make_training(folder / "grpo" / str(seed), seed, 0.9).release()
    make_pipeline_run(folder / "pipeline").release()
    make_sandbox_run(folder / "sandboxes").release()
    return folder


@pytest.fixture(scope="module")
def shown(runs: Path) -> int:
    return make_tokens(runs)


@pytest.fixture(scope="module")
def address(runs: Path, shown: int) -> Iterator[str]:
    with Dashboard([runs], port=0) as server:
        yield server.url


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_small_and_drawn_from_the_page(
    browser: Browser, address: str, shown: int, tmp_path: Path, name: str
) -> None:
    browser.look(1180, 700)
    place, there = PICTURES[name]
    browser.visit(address, place.format(tokens=shown), there)
    if name == "tokens":
        browser.evaluate("document.querySelector('.largest button').click()")
        assert "Largest credit" in browser.text(".largest")
        assert "Values of the critics" in browser.text(".detail")
    file = (DRAWN if DRAWN.name else tmp_path) / f"dashboard_{name}.webp"
    browser.screenshot(file)
    assert 10_000 < file.stat().st_size < LARGEST_FILE


@pytest.mark.parametrize("name", PICTURES)
def test_the_readme_shows_small_pictures(name: str) -> None:
    file = KEPT / f"dashboard_{name}.webp"
    assert f"]({file})" in Path("README.md").read_text()
    assert 10_000 < file.stat().st_size < LARGEST_FILE
