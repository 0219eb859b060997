"""Environments of gymnasium by prefix, compared with gymnasium itself."""

from __future__ import annotations

import random
import shutil
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text import cliffwalking, frozen_lake
from gymnasium.error import ResetNeeded
from requiring import require

import agentkit
from agentkit import registry
from agentkit.envs.check import check
from agentkit.errors import ConfigError, EnvCrashed, RegistryError

GAMES = "gymnasium:gymnasium_games:"


def made(name: str, **arguments: Any) -> Any:
    return agentkit.make(name if ":" in name else f"gymnasium:{name}", **arguments)


@pytest.fixture
def play():
    """Make environments, and close them afterwards."""
    envs = []

    def make(name: str, **arguments: Any) -> Any:
        envs.append(made(name, **arguments))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1"])
def test_episodes_are_those_of_gymnasium(name: str, play: Any) -> None:
    env, reference = play(name), gymnasium.make(name)
    rng = np.random.default_rng(0)
    for seed in range(3):
        env.reset(seed=seed)
        reference.reset(seed=seed)
        for _ in range(30):
            action = int(rng.integers(reference.action_space.n))  # pyright: ignore[reportAttributeAccessIssue]
            *_, reward, terminated, truncated, _ = reference.step(action)
            _, *mine, info = env.step(str(action))
            assert (mine, info["action_valid"]) == ([reward, terminated, truncated], True)
            if terminated or truncated:
                break


def test_text_that_the_environment_renders_is_the_observation(play: Any) -> None:
    env, reference = play("FrozenLake-v1", is_slippery=False), gymnasium.make("FrozenLake-v1", render_mode="ansi")
    reference.reset(seed=0)
    plain = str(reference.render()).replace("\x1b[41mS\x1b[0m", "<red>S</red>").strip("\n")
    assert env.reset(seed=0)[0] == plain
    assert env.step("right")[0].endswith("S<red>F</red>FF\nFHFH\nFFFH\nHFFG")


def test_other_observations_become_rows_of_numbers(play: Any) -> None:
    assert play("Blackjack-v1").reset(seed=0)[0] == ", ".join(map(str, gymnasium.make("Blackjack-v1").reset(seed=0)[0]))
    numbers = gymnasium.make("CartPole-v1").reset(seed=0)[0]
    read = [float(part) for part in play("CartPole-v1").reset(seed=0)[0].split()]
    np.testing.assert_allclose(read, numbers, rtol=1e-3)
    expected = "grid: 0 1 2\n3 4 5\nhand: 3, ace\nspeed: 0.25 -0.3333"
    assert play(f"{GAMES}Parts-v0").reset(seed=0)[0] == expected


def test_actions_are_numbers_or_documented_names(play: Any) -> None:
    lake = frozen_lake
    for word, number in {"left": lake.LEFT, "down": lake.DOWN, "right": lake.RIGHT, "up": lake.UP}.items():
        told = play("FrozenLake-v1").instructions
        assert f"{number} (move {word})" in told
    cliff = play("CliffWalking-v1")
    directions = {"up": cliffwalking.UP, "right": cliffwalking.RIGHT, "down": cliffwalking.DOWN}
    for word, number in directions.items():
        for text in (word, f" Move  {word.upper()} ", str(number)):
            cliff.reset(seed=0)
            seen = cliff.step(text)
            cliff.reset(seed=0)
            assert seen == cliff.step(str(number))
            assert seen[-1]["action_valid"]


@pytest.mark.parametrize("text", ["move", "", "4", "-1", "1.0", "٢", "up or down", "left\x00", "99999999999999999999"])
def test_a_text_without_an_action_changes_nothing(text: str, play: Any) -> None:
    env = play("CliffWalking-v1")
    before, _ = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(text)
    assert (reward, terminated, truncated, info["action_valid"]) == (0.0, False, False, False)
    assert observation == f"There is no such action.\n{before}"
    assert env.step("up")[0] != before


def test_names_can_be_given_and_must_fit(play: Any) -> None:
    env = play(f"{GAMES}Game-v0", actions=["Wait", "Go"], rules="Reach the end.")
    assert env.instructions == "Reach the end.\nActions: -1 (Wait); 0 (Go). Answer with the number or the name of one."
    env.reset(seed=0)
    assert [env.step(text)[-1]["action_valid"] for text in ("go", "-1", "1")] == [True, True, False]
    for wrong in (["only one"], ["same", "Same"], ["a", ""]):
        with pytest.raises(ConfigError, match="different names, one for each action"):
            made(f"{GAMES}Game-v0", actions=wrong)


def test_actions_of_several_numbers_and_of_text(play: Any) -> None:
    parts = play(f"{GAMES}Parts-v0")
    parts.reset(seed=0)
    assert [parts.step(text)[1] for text in ("2 3", "[1, 0]", "3 0", "1", "0.5 1", "a b")] == [23, 10, 0, 0, 0, 0]
    torque = play(f"{GAMES}Torque-v0")
    torque.reset(seed=0)
    results = [torque.step(text) for text in ("0.5 -1", "2.5 0", "nan 0", "1e999 0")]
    assert [(result[1], result[-1]["action_valid"]) for result in results] == [(-0.5, True), *[(0.0, False)] * 3]
    words = play(f"{GAMES}Words-v0")
    words.reset(seed=0)
    assert not words.step("abcabc")[-1]["action_valid"]
    assert not words.step("xyz")[-1]["action_valid"]
    assert words.step("cab")[0] == "you said 'cab'"


def test_success_is_told_by_the_environment_or_by_the_return(play: Any) -> None:
    words = play(f"{GAMES}Words-v0")
    for text, solved in (("abc", True), ("ab", False)):
        words.reset(seed=0)
        assert words.step(text)[-1]["success"] is solved
    for threshold, solved in ((None, True), (3.0, True), (3.5, False)):
        env = play(f"{GAMES}Game-v0", success_return=threshold)
        env.reset(seed=0)
        infos = [env.step("0")[-1] for _ in range(3)]
        assert [info["success"] for info in infos] == [False, False, solved]
        with pytest.raises(ResetNeeded):
            env.step("0")


def test_global_generators_repeat_and_stay_in_their_process(play: Any) -> None:
    def episode(env: Any, seed: int) -> Any:
        yield env.reset(seed=seed)[0]
        for _ in range(3):
            yield env.step("0")[0]

    name = f"{GAMES}GlobalDice-v0"
    alone = [list(episode(play(name), seed)) for seed in (1, 2)]
    states = random.getstate(), str(np.random.get_state())
    together = [list(pair) for pair in zip(episode(play(name), 1), episode(play(name), 2), strict=True)]
    assert [list(one) for one in zip(*together, strict=True)] == alone
    assert alone[0] != alone[1]
    assert states == (random.getstate(), str(np.random.get_state()))


@pytest.mark.parametrize(
    ("name", "reason"), [("Raises-v0", "ArithmeticError: the engine is broken"), ("Dies-v0", "died")]
)
def test_a_failure_of_the_environment_is_not_the_policys(name: str, reason: str, play: Any) -> None:
    env = play(f"{GAMES}{name}")
    env.reset(seed=0)
    with pytest.raises(EnvCrashed, match=reason):
        env.step("0")
    with pytest.raises(ResetNeeded):
        env.step("0")
    assert env.reset(seed=1)[0] == "0"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("FrozenLke-v1", {}, "no environment 'FrozenLke-v1'.*Did you mean.*FrozenLake"),
        ("nowhere:Maze-v0", {}, "no environment 'nowhere:Maze-v0': No module named 'nowhere'"),
        ("FrozenLake-v1", {"slippery": True}, "takes no argument 'slippery'; did you mean is_slippery"),
        ("FrozenLake-v1", {"map_name": "3x3"}, "cannot make FrozenLake-v1 with {'map_name': '3x3'}: KeyError"),
        ("FrozenLake-v1", {"desc": {1, 2}}, "plain data"),
        ("gymnasium_games:Picture-v0", {}, "observation space Box.*no text form"),
        ("gymnasium_games:Nested-v0", {}, "action space Dict.*cannot be written as text"),
    ],
)
def test_errors_name_the_argument(name: str, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        agentkit.make(f"gymnasium:{name}", **arguments)


def test_the_registry_describes_names_with_a_prefix() -> None:
    entry = registry.entry("gymnasium:Taxi-v4")
    assert (entry.spec.kwargs, entry.diagnose()) == ({"id": "Taxi-v4"}, None)
    cls = registry.env_class(entry.id)
    steps = [
        cls.max_turns_for(id="Taxi-v4", **limit) for limit in ({}, {"max_episode_steps": 7}, {"max_episode_steps": -1})
    ]
    assert steps == [200, 7, 100]
    with pytest.raises(RegistryError, match="lacks the name after the colon, as in 'gymnasium:FrozenLake-v1'"):
        registry.entry("gymnasium:")
    with pytest.raises(RegistryError, match="no environment 'gymnasim:Taxi-v4'"):
        registry.entry("gymnasim:Taxi-v4")


def test_a_vector_of_environments_in_processes() -> None:
    vector = agentkit.make_vec("gymnasium:FrozenLake-v1", 2, mode="process", is_slippery=False)
    try:
        observations, _ = vector.reset(seed=0)
        assert observations == ("<red>S</red>FFF\nFHFH\nFFFH\nHFFG",) * 2
        observations, *_ = vector.step(["down", "right"])
        assert observations[0] != observations[1]
    finally:
        vector.close()


def test_an_environment_in_a_sandbox() -> None:
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    env = agentkit.make("gymnasium:FrozenLake-v1", sandbox="local", is_slippery=False)
    try:
        assert env.instructions.endswith("3 (move up). Answer with the number or the name of one.")
        assert (env.max_turns, env.reset(seed=0)[0]) == (100, "<red>S</red>FFF\nFHFH\nFFFH\nHFFG")
        assert env.step("right")[0].endswith("S<red>F</red>FF\nFHFH\nFFFH\nHFFG")
    finally:
        env.close()


def test_it_passes_the_checks() -> None:
    results = check(f"{GAMES}Game-v0", timeout=60)
    assert [(result.name, result.detail) for result in results if not result.passed] == []
