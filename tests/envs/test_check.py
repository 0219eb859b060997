"""The checker accepts the built-in environments and detects each documented fault."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from agentkit import registry
from agentkit.envs import check as examination
from agentkit.envs.base import AsyncTextEnv, TextEnv
from agentkit.envs.check import check
from agentkit.envs.sync import SyncTextEnv, make_sync


class Good(TextEnv):
    """Repeat the shown word, which has four letters, so that a random agent succeeds sometimes."""

    instructions = "Repeat the word."
    max_turns = 3
    concurrency = "inline"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = ("rose", "lily", "iris")[self.np_random.integers(3)]
        return self.word, self.info(False)

    def step(self, action: str) -> Any:
        success = action == self.word
        return self.word, float(success), success, False, self.info(success)

    def info(self, success):
        return {"success": success, "action_valid": True, "admissible_actions": ["rose", "lily", "iris"]}

    def expert(self):
        yield self.word


class NoRules(Good):
    instructions = " "


class ForgetsTheSeed(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        observation, info = super().reset(seed=None)
        return observation, info


class UsesRandom(Good):
    def step(self, action: str):
        random.random()
        return super().step(action)


class SeedsNumpy(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        np.random.seed(0)
        return super().reset(seed=seed)


class DependsOnHash(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        _, info = super().reset(seed=seed)
        self.word = ("rose", "lily", "iris")[hash("seed") % 3]
        return f"{self.word}{hash('x') % 1000}", info


class GoesOnAfterSuccess(Good):
    def step(self, action: str):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, False, truncated, info


class NanReward(Good):
    def step(self, action: str):
        observation, _, *rest = super().step(action)
        return observation, float("nan"), *rest


class SpeaksBytes(Good):
    def step(self, action: str):
        observation, *rest = super().step(action)
        return observation.encode(), *rest


class NoSuccessFlag(Good):
    def info(self, success):
        return {"action_valid": True}


class DiesOfNonsense(Good):
    def step(self, action: str):
        {"rose": 1, "lily": 2, "iris": 3}[action]
        return super().step(action)


class WrongExpert(Good):
    def expert(self):
        yield "tulip"


class Line(TextEnv):
    """Five cells in a row; both ends are goals.

    The expert's plans lead to the left and to the right in turn. Asked before every step, it walks to and fro; a plan
    that is followed arrives.
    """

    instructions = "Reach an end."
    max_turns = 6
    concurrency = "inline"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.cell, self.asked = 2, 0
        return "cell 2", {"success": False, "action_valid": True, "admissible_actions": ["left", "right"]}

    def step(self, action: str) -> Any:
        self.cell += {"left": -1, "right": 1}.get(action, 0)
        success = self.cell in (0, 4)
        info = {"success": success, "action_valid": action in ("left", "right")}
        return f"cell {self.cell}", float(success), success, False, info

    def expert(self):
        self.asked += 1
        action, steps = ("left", self.cell) if self.asked % 2 else ("right", 4 - self.cell)
        yield from [action] * steps


class StopsHalfWay(Line):
    """Its plan is wrong after the first step; asking the expert before every step hides this."""

    def expert(self):
        yield "left"
        yield from ["stay"] * 9


class CannotCloseTwice(Good):
    closed = False

    def close(self):
        assert not self.closed, "closed already"
        self.closed = True


class Hangs(Good):
    release = threading.Event()

    def step(self, action: str):
        self.release.wait(60)
        return super().step(action)


class LeavesThePlayer(Good):
    def step(self, action: str):
        raise SystemExit(3)


class OverWire(AsyncTextEnv):
    instructions = Good.instructions
    max_turns = 3

    def __init__(self):
        self.inner = Good()

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        await super().reset(seed=seed)
        if seed is not None:
            return self.inner.reset(seed=seed)
        return self.inner.reset(seed=int(self.np_random.integers(2**31)))

    async def step(self, action: str):
        return self.inner.step(action)

    def expert(self):
        return self.inner.expert()


@pytest.fixture
def examine(monkeypatch):
    monkeypatch.setattr(registry, "_explicit", {})
    from gymnasium.envs.registration import registry as theirs

    before = dict(theirs)

    def run(cls, only=None, **options):
        if only is not None:
            monkeypatch.setattr(examination, "CHECKS", {only: examination.CHECKS[only]})
        registry.register("Subject-v0", cls)
        return {result.name: result for result in check("Subject-v0", **options)}

    yield run
    theirs.clear()
    theirs.update(before)


@pytest.mark.parametrize(
    ("id", "kwargs"),
    [
        ("FrozenLake-v1", {}),
        ("FrozenLake-v1", {"is_slippery": True, "size": 5}),
        ("Sokoban-v0", {"vocabulary": "words", "split": "test"}),
        ("Countdown-v0", {}),
    ],
)
def test_the_built_in_environments_pass(id, kwargs):
    results = check(id, **kwargs)
    assert len(results) == 9
    assert [result for result in results if not result.passed] == []


def test_a_good_environment_passes(examine):
    assert all(result.passed for result in examine(Good).values())


def test_an_asynchronous_environment_passes(examine):
    results = examine(OverWire)
    assert [result for result in results.values() if not result.passed] == []


@pytest.mark.parametrize(
    ("cls", "name", "words"),
    [
        (NoRules, "declares what it needs", "instructions"),
        (ForgetsTheSeed, "passes gymnasium's checker", "seed"),
        (UsesRandom, "leaves global generators alone", "`random`"),
        (SeedsNumpy, "leaves global generators alone", "`numpy.random`"),
        (DependsOnHash, "same seed, same episode", "hash"),
        (GoesOnAfterSuccess, "survives a random agent", "must end it"),
        (NanReward, "survives a random agent", "not a finite number"),
        (SpeaksBytes, "survives a random agent", "observation"),
        (NoSuccessFlag, "survives a random agent", "info['success'] is None"),
        (DiesOfNonsense, "survives a random agent", "step raised KeyError"),
        (WrongExpert, "expert solves it", "does not solve"),
        (CannotCloseTwice, "close can be called twice", "closed already"),
        (LeavesThePlayer, "survives a random agent", "SystemExit"),
    ],
)
def test_each_fault_is_caught_and_explained(examine, cls, name, words):
    result = examine(cls, only=name)[name]
    assert not result.passed
    assert words in result.detail


@pytest.mark.parametrize(("cls", "passes"), [(Line, True), (StopsHalfWay, False)])
def test_an_experts_plan_is_followed_as_imitation_follows_it(examine, cls, passes):
    assert examine(cls, only="expert solves it")["expert solves it"].passed == passes


def test_a_failed_expert_check_shows_an_episode(examine):
    transcript = examine(WrongExpert, only="expert solves it")["expert solves it"].transcript
    assert transcript.startswith("seed 0\n")
    assert "\n1. tulip  reward 0.0\n" in transcript
    assert "\n3. tulip" in transcript
    assert "4. " not in transcript  # three turns


@pytest.mark.parametrize(("cls", "words"), [(NanReward, "reward nan"), (DiesOfNonsense, "KeyError")])
def test_a_failed_random_agent_shows_the_step_that_failed(examine, cls, words):
    transcript = examine(cls, only="survives a random agent")["survives a random agent"].transcript
    assert transcript.startswith("seed ")
    assert any(words in line for line in transcript.splitlines()[-2:])


def test_transcripts_are_short_and_printable():
    transcript = examination.Transcript(3, "start")
    for number in range(50):
        transcript.add("\x1b[31m", ("x" * 10_000, number, False, number == 49, {}))
    text = str(transcript)
    assert "\x1b" not in text
    assert "… 30 steps" in text
    assert "reward 29" not in text
    assert "50. \\x1b[31m  reward 49, truncated" in text
    assert len(text) < 25_000


def test_a_hanging_environment_does_not_hang_the_checker(examine):
    try:
        result = examine(Hangs, only="survives a random agent", timeout=0.3)["survives a random agent"]
    finally:
        Hangs.release.set()
    assert not result.passed
    assert "did not end within 0.3 s" in result.detail


def test_environment_that_cannot_be_loaded_is_a_failed_check():
    (result,) = check("Nothing-v0")
    assert not result.passed
    assert "no environment" in result.detail
    (result,) = check("FrozenLake-v1", sise=4)
    assert "did you mean 'size'" in result.detail


def test_sync_wrapper_plays_and_closes_an_asynchronous_environment():
    env = make_sync(OverWire)
    assert isinstance(env, SyncTextEnv)
    env.reset(seed=0)
    assert env.step("rose")[4]["action_valid"]
    env.close()
    env.close()
    with pytest.raises(ValueError, match="render_mode='ansi' is not one of OverWire's modes"):
        make_sync(OverWire, render_mode="ansi")
