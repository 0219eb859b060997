"""Demonstrations: the expert's episodes with the configured noise, recorded exactly as they were played."""

from __future__ import annotations

import numpy as np
import pytest

from agentkit.config import EnvConfig, ImitationConfig
from agentkit.envs.base import TextEnv
from agentkit.errors import ConfigError
from agentkit.registry import make, register
from agentkit.trainers.imitation import expert_episodes
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import ChatRenderer

LAKE = EnvConfig(id="FrozenLake-v1", kwargs={"split": "train"}, max_turns=12)


def demonstrate(env: EnvConfig = LAKE, **settings):
    renderer = ChatRenderer(load_tokenizer("quickstart"))
    return expert_episodes(env, renderer, ActionParser("tagged", 1), ImitationConfig(**settings), max_context=1024)


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
        demonstrate(EnvConfig(id="Unlisted-v0"), episodes=20, noise=0.9)
