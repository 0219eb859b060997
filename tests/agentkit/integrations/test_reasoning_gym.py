"""reasoning-gym by prefix, compared with the library itself."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from requiring import require

import agentkit
from agentkit import extras, prefixes, preflight
from agentkit.config_io import parse_config
from agentkit.envs.check import check
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import ConfigError, EnvCrashed, MissingExtra

REFERENCE = """
import json, sys

output, sys.stdout = sys.stdout, sys.stderr
import reasoning_gym

datasets, seed, size, number, wrong = json.loads(sys.argv[1])
told = {}
for name in datasets:
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=size)
    entry = dataset[number]
    scores = []
    for answer in (entry["answer"], wrong):
        try:
            scores.append(float(dataset.score_answer(answer, entry)))
        except Exception:
            scores.append(None)
    told[name] = entry["question"], entry["answer"], scores
json.dump(told, output)
"""
WRONG = "certainly not this"
SEED, SIZE, ITEM = 7, 20, 3
ACCEPTS_ANYTHING = {"game_of_life_halting": "a wrong answer gets as much"}
"""Faults of reasoning-gym 0.1.25, which docs/integrations/reasoning_gym.md names."""


@pytest.fixture(autouse=True)
def library() -> None:
    require("reasoning_gym", "pip install 'agentkit-rl[reasoning-gym]'")


def made(dataset: str, **options: Any) -> Any:
    return agentkit.make(f"reasoning_gym:{dataset}", **options)


def theirs(dataset: str, **options: Any) -> Any:
    return importlib.import_module("reasoning_gym").create_dataset(dataset, **options)


def compare(datasets: Sequence[str]) -> dict[str, str]:
    """Return how episodes differ from the library's own items and scores; datasets that do not differ are left out.

    The reference runs in a process with the hash seed of worker processes, since some datasets depend on it.
    """
    reference = subprocess.run(
        [sys.executable, "-c", REFERENCE, json.dumps([datasets, SEED, SIZE, ITEM, WRONG])],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=1200,
    )
    found = {
        dataset: difference(dataset, *expected) for dataset, expected in json.loads(reference.stdout.decode()).items()
    }
    return {dataset: problem for dataset, problem in found.items() if problem}


def difference(dataset: str, question: str, answer: str | None, scores: list[float | None]) -> str:
    """Return how an episode differs from an item; an empty text if it does not."""
    env = made(dataset, seed=SEED, size=SIZE)
    try:
        rewards = []
        for text, score in zip((answer, WRONG), scores, strict=True):
            if env.reset(seed=ITEM)[0] != question:
                return "another question"
            if list(env.expert()) != ([] if answer is None else [answer]):
                return "another answer"
            if text is not None:
                _, reward, *_, info = env.step(text)
                rewards.append(reward)
                if (reward, info["action_valid"]) != ((0.0, False) if score is None else (score, True)):
                    return f"{text!r} gets {reward}, not {score}"
        return "a wrong answer gets as much" if len(rewards) == 2 and rewards[1] >= rewards[0] else ""
    finally:
        env.close()


def test_questions_and_scores_are_those_of_the_library() -> None:
    """Of these, ``isomorphic_strings`` depends on the hash seed, and the scorer of ``prime_factorization`` raises."""
    datasets = [
        "leg_counting",
        "basic_arithmetic",
        "gsm_symbolic",
        "isomorphic_strings",
        "prime_factorization",
        "tsumego",
    ]
    assert compare(datasets) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_dataset_gives_the_librarys_questions_and_scores() -> None:
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS.keys() - {"composite"})
    assert len(names) > 100
    assert compare(names) == ACCEPTS_ANYTHING


def test_items_beyond_the_first_part_have_seeds_of_their_own() -> None:
    """``gsm_symbolic`` draws its templates for the whole dataset, ``chain_sum`` for each item alone."""
    for dataset in ("gsm_symbolic", "chain_sum"):
        env = made(dataset, size=10)
        try:
            expected = theirs(dataset, seed=20, size=10)[3]["question"]
            assert env.reset(seed=23)[0] == expected
            assert env.reset(seed=(1 << 31) + 23)[0] == expected
        finally:
            env.close()
    assert theirs("chain_sum", seed=0, size=30)[23] != theirs("chain_sum", seed=20, size=10)[4]


def test_the_parts_share_no_item() -> None:
    seen = {}
    for split in ("train", "test", None):
        env = made("chain_sum", split=split)
        try:
            seen[split] = {env.reset(seed=seed)[1]["item"] for seed in range(20)}
        finally:
            env.close()
    assert not seen["train"] & seen["test"]
    assert seen[None] == set(range(20))
    reference = theirs("chain_sum", seed=0)
    env = made("chain_sum", split="test")
    assert env.reset(seed=5)[0] == reference[11]["question"]
    env.close()


def test_interleaved_episodes_are_as_alone_and_leave_global_generators_alone() -> None:
    """``pool_matrix`` seeds the global generator of numpy."""
    alone = []
    for seed in (1, 2):
        env = made("pool_matrix")
        alone.append([env.reset(seed=seed)[0], env.step(WRONG)[:4], env.reset(seed=seed + 10)[0]])
        env.close()
    random.seed(5)
    np.random.seed(5)
    states = random.getstate(), str(np.random.get_state())
    first, second = made("pool_matrix"), made("pool_matrix")
    try:
        resets = [env.reset(seed=seed)[0] for env, seed in ((first, 1), (second, 2))]
        steps = [env.step(WRONG)[:4] for env in (second, first)]
        again = [env.reset(seed=seed + 10)[0] for env, seed in ((second, 2), (first, 1))]
    finally:
        first.close()
        second.close()
    assert [list(one) for one in zip(resets, steps[::-1], again[::-1], strict=True)] == alone
    assert states == (random.getstate(), str(np.random.get_state()))


def test_an_episode_is_one_answer_and_the_expert_knows_it() -> None:
    env = made("leg_counting", render_mode="ansi")
    try:
        question, info = env.reset(seed=0)
        assert (info["success"], env.render()) == (False, question)
        (answer,) = env.expert()
        observation, reward, terminated, truncated, info = env.step(answer)
        assert (observation, reward, terminated, truncated) == ("Score: 1", 1.0, True, False)
        assert (info["success"], info["action_valid"], info["metrics"]) == (True, True, {"score": 1.0})
        assert list(env.expert()) == []
        with pytest.raises(ResetNeeded):
            env.step(answer)
    finally:
        env.close()


@pytest.mark.timeout(600)
def test_an_answer_that_exhausts_the_scorer_is_the_policys() -> None:
    env = made("countdown")
    try:
        env.reset(seed=0)
        observation, reward, terminated, _, info = env.step("9**9**9**9")
        assert (reward, terminated, info["action_valid"]) == (0.0, True, False)
        assert observation == "Not an answer that can be scored: the scorer was ended by SIGXCPU."
        env.reset(seed=0)
        assert env.step("\ud800")[1] == theirs("countdown", seed=0).score_answer("?", theirs("countdown", seed=0)[0])
    finally:
        env.close()


def test_a_scorer_that_fails_with_the_known_answer_is_not_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = importlib.import_module("agentkit.integrations.reasoning_gym_worker")
    scorer = type(theirs("leg_counting", seed=0))

    def broken(self: Any, answer: str, entry: dict[str, Any]) -> float:
        if answer == "1" and entry["answer"] != "1":
            raise ValueError("no answer")
        if self.config.max_instances == 3:
            raise OSError("no word list")
        return 1.0

    monkeypatch.setattr(scorer, "score_answer", broken)
    handle = worker.make_handler()
    assert handle("score", "leg_counting", {}, 0, "1") == ("ok", (0.0, "the scorer raised ValueError: no answer"))
    kind, problem = handle("score", "leg_counting", {"max_instances": 3}, 0, "2")
    assert (kind, "cannot score item 0: the scorer raised OSError: no word list" in problem) == ("crashed", True)


def test_a_worker_that_died_is_replaced_within_an_episode() -> None:
    env = made("leg_counting")
    try:
        env.reset(seed=0)
        (answer,) = env.expert()
        env.close()
        env.reset(seed=0)
        os.kill(env._library._worker.pid, signal.SIGKILL)
        with pytest.raises(EnvCrashed, match="died"):
            env.step(answer)
        env.reset(seed=0)
        assert env.step(answer)[1] == 1.0
    finally:
        env.close()


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("leg_countin", {}, "no dataset 'leg_countin'; did you mean leg_counting"),
        ("leg_counting", {"min_animal": 3}, "leg_counting has no option 'min_animal'; did you mean min_animals"),
        ("leg_counting", {"min_animals": -1}, "leg_counting cannot be made with.*min_animals must be positive"),
        ("leg_counting", {"seed": "x"}, "seed='x' of the dataset leg_counting must be a whole number from 0"),
        ("leg_counting", {"size": 0}, "size=0 of the dataset leg_counting must be a whole number from 1"),
    ],
)
def test_errors_name_the_option(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        made(name, **options)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        extras.importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find(name)
    )
    with pytest.raises(MissingExtra, match=r"pip install 'agentkit-rl\[reasoning-gym\]'"):
        made("leg_counting", min_animals=2, max_animals=11)  # options that no other test describes
    assert "not installed" in str(prefixes.PREFIXES["reasoning_gym"].problem())


def test_a_run_refuses_a_wrong_option_before_it_starts() -> None:
    settings = parse_config("env: {id: 'reasoning_gym:leg_counting', kwargs: {max_animal: 3}}")
    with pytest.raises(ConfigError, match=r"env\.kwargs: the dataset leg_counting has no option 'max_animal'"):
        preflight.check(settings)


def test_a_mixture_with_it() -> None:
    env = agentkit.make("Mixture-v0", domains=[{"id": "reasoning_gym:leg_counting"}, {"id": "Countdown-v0"}])
    wrapped = SyncTextEnv(env)
    try:
        seen = {wrapped.reset(seed=seed)[1]["domain"] for seed in range(8)}
        assert seen == {"reasoning_gym:leg_counting", "Countdown-v0"}
    finally:
        wrapped.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_passes_the_checks() -> None:
    results = check("reasoning_gym:leg_counting", timeout=240)
    assert [(result.name, result.detail) for result in results if not result.passed] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_passes_the_checks_in_a_sandbox() -> None:
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    results = check("reasoning_gym:leg_counting", timeout=240, sandbox="local")
    assert [(result.name, result.detail) for result in results if not result.passed] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_imitates_the_expert_and_trains(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "env: {id: 'reasoning_gym:leg_counting', kwargs: {split: train, max_animals: 2, min_animals: 1}}\n"
        "evaluation: {episodes: 8, kwargs: {split: test}}\n"
        "imitation: {episodes: 16, epochs: 1}\n"
        "rollout: {groups: 2, group_size: 2, max_tokens: 8}\n"
        "steps: 2\n"
        "learner: {lr: 1.0e-3}\n"
    )
    command = [sys.executable, "-m", "agentkit", "run", str(config), f"dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demonstrations  100.0%" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "rollout/success" in line] == [1, 2]
