"""The checker accepts the built-in environments, and catches each fault that it is there for."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from agentkit import registry
from agentkit.envs import check as examination
from agentkit.envs.adapters import Blocking
from agentkit.envs.base import AsyncTextEnv, TextEnv
from agentkit.envs.check import check


class Good(TextEnv):
    """Say the word that is shown. Four letters, so that a random agent succeeds now and then."""

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
        (GoesOnAfterSuccess, "survives a random agent", "must terminate"),
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


def test_a_hanging_environment_does_not_hang_the_checker(examine):
    try:
        result = examine(Hangs, only="survives a random agent", timeout=0.3)["survives a random agent"]
    finally:
        Hangs.release.set()
    assert not result.passed
    assert "did not end within 0.3 s" in result.detail


def test_what_cannot_be_loaded_is_a_result_too():
    (result,) = check("Nothing-v0")
    assert not result.passed
    assert "no environment" in result.detail
    (result,) = check("FrozenLake-v1", sise=4)
    assert "did you mean 'size'" in result.detail


def test_the_adapter_closes_its_loop():
    env = Blocking(OverWire())
    env.reset(seed=0)
    assert env.step("rose")[4]["action_valid"]
    env.close()
    env.close()
    assert env._loop.is_closed()
