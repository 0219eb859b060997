"""Demonstrations: the expert's episodes with the configured noise, recorded exactly as they were played."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from agentkit.config import RunConfig
from agentkit.envs.base import TextEnv
from agentkit.envs.frozen_lake.env import FrozenLake
from agentkit.errors import ConfigError, EnvCrashed, EnvFailureBudgetExceeded
from agentkit.registry import make, register
from agentkit.trainers.imitation import expert_episodes
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer

LAKE = {"id": "FrozenLake-v1", "kwargs": {"split": "train"}, "max_turns": 12}


def played(env: dict[str, Any] = LAKE, rollout: dict[str, Any] | None = None, **settings):
    config = RunConfig.model_validate({"env": env, "imitation": settings, "rollout": rollout or {}})
    return expert_episodes(config, ChatRenderer(load_tokenizer("quickstart")), ActionParser("tagged", 1))


def demonstrate(env: dict[str, Any] = LAKE, **settings):
    episodes, failures = played(env, **settings)
    assert not failures
    return episodes


def replayed(episode):
    """Return whether the environment gives the same observations, rewards and success for these actions."""
    env = make("FrozenLake-v1", split="train")
    observation, info = env.reset(seed=episode.seed)
    for turn in episode.turns:
        assert turn.observation == observation
        observation, reward, _, _, info = env.step(turn.actions[0])
        assert turn.reward == reward
    assert episode.success == info["success"]


def test_the_expert_alone_always_succeeds():
    episodes = demonstrate(episodes=50)
    assert all(episode.success for episode in episodes)
    for episode in episodes:
        replayed(episode)


def test_noise_replaces_its_share_of_the_actions_and_is_carried_out():
    episodes = demonstrate(episodes=300, noise=0.4)
    other, total = 0, 0
    for episode in episodes:
        replayed(episode)
        env = make("FrozenLake-v1", split="train")
        env.reset(seed=episode.seed)
        for turn in episode.turns:
            other += turn.actions[0] != next(env.unwrapped.expert())
            total += 1
            env.step(turn.actions[0])
    share = other / total  # a random action is the expert's one time in four
    assert abs(share - 0.4 * 0.75) < 4 * np.sqrt(0.3 * 0.7 / total)
    assert 0.4 < np.mean([episode.success for episode in episodes]) < 0.8
    again = demonstrate(episodes=300, noise=0.4)
    assert [[t.actions for t in e.turns] for e in again] == [[t.actions for t in e.turns] for e in episodes]


class Unlisted(TextEnv):
    instructions = "Say yes."
    concurrency = "inline"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "?", {"success": False, "action_valid": True}

    def step(self, action):
        return "!", 1.0, True, False, {"success": True, "action_valid": True}

    def expert(self):
        yield "yes"


def test_noise_without_a_list_of_actions_is_an_error_with_the_remedy():
    register("Unlisted-v0", Unlisted)
    with pytest.raises(ConfigError, match="admissible_actions"):
        demonstrate({"id": "Unlisted-v0"}, episodes=20, noise=0.9)


class Shaky(FrozenLake):
    """Breaks in a step of the tasks in ``broken``: in the first instance for each of them, or ``always``."""

    made = 0
    seen: ClassVar[set[int]] = set()

    def __init__(self, broken: list[int], always: bool = False, call: str = "step", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        Shaky.made += 1
        self.broken, self.always, self.call, self.gone = broken, always, call, False

    def _fail(self, call: str) -> None:
        assert not self.gone, "a broken instance was used again"
        if call == self.call and self.seed_now in self.broken and (self.always or self.seed_now not in Shaky.seen):
            Shaky.seen.add(self.seed_now)
            self.gone = True
            raise ConnectionResetError("the server of the lake is gone")

    def reset(self, *, seed=None, options=None):
        self.seed_now = seed
        self._fail("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._fail("step")
        return super().step(action)

    def expert(self):
        self._fail("expert")
        yield from super().expert()

    def close(self):
        super().close()
        if self.gone:
            raise OSError("it cannot be closed either")


def shaky(broken: list[int], **kwargs: Any) -> dict[str, Any]:
    register("Shaky-v0", Shaky)
    Shaky.made, Shaky.seen = 0, set()
    return {**LAKE, "id": "Shaky-v0", "kwargs": {"split": "train", "broken": broken, **kwargs}}


@pytest.mark.parametrize("call", ["reset", "step", "expert"])
def test_an_episode_whose_environment_fails_is_repeated_in_a_fresh_one(call: str) -> None:
    episodes = demonstrate(shaky([3, 7], call=call), episodes=10)
    assert Shaky.seen == {3, 7}
    assert [episode.seed for episode in episodes] == list(range(10))
    for episode, calm in zip(episodes, demonstrate(episodes=10), strict=True):
        replayed(episode)
        assert [turn.actions for turn in episode.turns] == [turn.actions for turn in calm.turns]


def test_an_episode_that_fails_in_every_attempt_is_left_out() -> None:
    episodes, failures = played(shaky([3, 7], always=True), {"retries": 1}, episodes=10)
    assert [episode.seed for episode in episodes] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert [type(error) for error in failures] == [EnvCrashed, EnvCrashed]
    assert "step raised ConnectionResetError: the server of the lake is gone" in str(failures[0])
    assert Shaky.made == 1 + 2 * 2  # one, and another one after each failed attempt


def test_experts_without_any_episode_are_an_error_of_the_environment() -> None:
    with pytest.raises(EnvCrashed, match="the server of the lake is gone"):
        played(shaky(list(range(100)), always=True), episodes=5)
    with pytest.raises(EnvFailureBudgetExceeded, match=r"20 of the last 20 episodes .*the server of the lake is gone"):
        played(shaky(list(range(100)), always=True), episodes=100)
