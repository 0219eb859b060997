"""The benchmark beside TRL: its page from given figures, its game and its models, and a step of each arm."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from requiring import require

from benchmarks.peers import games
from benchmarks.peers.games import HUNG, MEAN_S, TIMEOUT_S, SlowLine, TRLLine, delay
from benchmarks.peers.page import page, problems, ratios, verdict
from benchmarks.peers.settings import ARMS, ASYNC, FLOOR, MULTI, ROLLOUT, SINGLE, SYNC, TRL


def step(seconds: float, tokens: int = 4096) -> dict[str, float]:
    parts = {"generation": 0.2, "training": seconds / 2, "waiting": 0.3, "update": 0.01}
    return {"seconds": seconds, "cpu": seconds, **parts, "tokens": tokens, "episodes": 128}


def rounds(**seconds: float) -> list[dict[str, Any]]:
    """Two rounds; everything takes twice as long in the second one."""
    of = {TRL: 3.0, ROLLOUT: 2.0, SYNC: 1.5, ASYNC: 1.0, FLOOR: 1.2} | seconds
    return [{arm: [step(factor * of[arm]), step(factor * of[arm])] for arm in ARMS} for factor in (1, 2)]


def test_ratios_are_within_a_round() -> None:
    assert ratios(rounds(), SYNC, TRL, "seconds") == [2.0, 2.0]


def test_goals() -> None:
    text = verdict(SINGLE, rounds())
    goal = "The goal (2 times, or at most 1.2 times the floor) is"
    assert f"{SYNC}: 2.00 times as fast as TRL, and 1.25 times the time of the floor. {goal} met." in text
    assert f"{ASYNC}: 3.00 times as fast as TRL, and 0.83 times the time of the floor. {goal} met." in text
    without_floor = [{arm: steps for arm, steps in results.items() if arm != FLOOR} for results in rounds()]
    assert "The goal (5 times) is **missed**." in verdict(MULTI, without_floor)


def test_rounds_that_disagree_give_no_verdict() -> None:
    measured = rounds()
    measured[1][SYNC] = [step(12.0)] * 2
    text = verdict(SINGLE, measured)
    assert f"{SYNC}: **no verdict**, because the rounds disagree on what is faster (1.25 (0.50 to 2.00))" in text
    assert f"{ASYNC}: 3.00 times as fast" in text


def test_arms_with_other_tokens_cannot_be_compared() -> None:
    assert problems(SINGLE, rounds()) == []
    measured = rounds()
    measured[0][SYNC] = [step(1.0, tokens=2048)] * 2
    (problem,) = problems(SINGLE, measured)
    assert f"{SYNC} generated 24.0 tokens per episode, and {TRL} 32.0" in problem


def test_the_page_without_results_and_with_all() -> None:
    assert page({}).count("Not measured yet.") == 3
    found = {"machine": "Two CPUs.", "rounds": rounds()}
    text = page({"single": found, "multi": found, "curves": {"none": [0.2] * 6 + [0.8] * 54, "docker": [0.3] * 60}})
    assert "| TRL | 4.50 | 1 | 4.50 | 1 | 32.0 |" in text
    assert f"| {ASYNC} | 1.50 | 3.00 (3.00 to 3.00) |" in text
    assert "| in Docker sandboxes | 30% | 30% |" in text
    assert "| in the trainer's process | 20% | 80% |" in text


def test_latencies() -> None:
    random = np.random.default_rng(0)
    drawn = np.array([delay(random) for _ in range(10_000)])
    answered = drawn[np.isfinite(drawn)]
    assert 1 - len(answered) / len(drawn) == pytest.approx(HUNG, abs=0.005)
    assert answered.min() >= 0
    assert answered.max() < TIMEOUT_S / 2
    assert answered.mean() == pytest.approx(1.08 * MEAN_S, rel=0.05)  # the negative values of the normal are cut


def test_both_games_have_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(games, "delay", lambda random: 0.0)
    ours, theirs = SlowLine(), TRLLine()
    assert ours.reset(seed=7)[0] == theirs.reset(seed=7) == "Position:7"
    total, over, text = 0.0, False, ""
    for to in "RRLRL":
        text, reward, over, _, _ = ours.step(f'{{"name": "move", "arguments": {{"to": "{to}"}}}}')
        assert theirs.move(to) == text
        total += reward
    assert over
    assert text == "Position:8"
    assert theirs.get_reward() == pytest.approx(total) == pytest.approx(0.6)


def test_a_hung_step_costs_trl_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(games, "delay", lambda random: float("inf"))
    monkeypatch.setattr(games, "_forever", released)
    monkeypatch.setattr(games, "TIMEOUT_S", 0.1)
    game, began = TRLLine(), time.monotonic()
    game.reset(seed=0)
    game.move("R")
    game.move("R")
    assert time.monotonic() - began < 5
    assert game.get_reward() is None
    released.set()


def test_an_answer_of_the_single_turn_model_never_ends() -> None:
    require("torch", "pip install 'agentkit-rl[train]'")
    import torch

    from benchmarks.peers.models import endless_model

    model = endless_model()
    ids = torch.randint(model.config.vocab_size, (4, 60), generator=torch.Generator().manual_seed(0))
    probabilities = model(ids).logits.softmax(-1)
    assert probabilities[..., model.config.eos_token_id].max() < 1e-12
    assert probabilities.max() < 0.1  # it is no constant model either


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_measures_every_arm(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    require("trl", "pip install trl==1.16.0")
    from benchmarks.peers import __main__

    monkeypatch.setattr(__main__, "MODELS", tmp_path)
    found = __main__.measure(SINGLE, 1, 2)
    assert set(found["rounds"][0]) == set(ARMS)
    assert problems(SINGLE, found["rounds"]) == []
    for steps in found["rounds"][0].values():
        assert len(steps) == 1
        assert 0 < steps[0]["generation"] <= steps[0]["seconds"]
        assert 0 < steps[0]["training"] <= steps[0]["seconds"]
