"""Vectors of text environments: the semantics of gymnasium's own vectors, and isolated failures."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from typing import Any, ClassVar

import faulty_envs
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from requiring import require

import agentkit
from agentkit.envs.base import AsyncTextEnv
from agentkit.envs.vector.env import TextVectorEnv
from agentkit.errors import ConfigError, EnvCrashed, RegistryError

N = 3
MODES = ["async", "process"]


class Waiting(AsyncTextEnv):
    """An environment that waits briefly at every step, or forever."""

    instructions = "Wait."
    concurrency: ClassVar[Any] = "inline"

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed)
        return f"begun {self.np_random.random()}", {"success": False, "action_valid": True}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(3600 if action == "hang" else 0.2)
        return "waited", 1.0, False, False, {"success": False, "action_valid": True}


class Picky(faulty_envs.Faulty):
    """Rejects unknown arguments and reset options."""

    def __init__(self, word: str = "count") -> None:
        super().__init__(word)
        if word != "count":
            raise ConfigError(f"word={word!r} must be 'count'")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options:
            raise ConfigError(f"unknown options {options}")
        return super().reset(seed=seed)


class Counting(faulty_envs.Faulty):
    """The same, for modes with threads."""

    concurrency: ClassVar[Any] = "thread"


@pytest.fixture(autouse=True)
def registered() -> None:
    agentkit.register("TestFaulty-v0", "faulty_envs:Faulty")
    agentkit.register("TestPicky-v0", "test_vector:Picky")
    agentkit.register("TestThreaded-v0", Counting)
    agentkit.register("TestWaiting-v0", Waiting)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether infos are equal where their masks are set."""
    return first.keys() == second.keys() and all(
        same(value, second[key]) if isinstance(value, dict) else list(value) == list(second[key])
        for key, value in first.items()
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autoreset", list(AutoresetMode), ids=lambda mode: mode.name)
def test_episodes_are_those_of_gymnasiums_own_vector(mode: str, autoreset: AutoresetMode) -> None:
    makers = [lambda: gymnasium.make("agentkit:agentkit/FrozenLake-v1", disable_env_checker=True)] * N
    theirs = SyncVectorEnv(makers, autoreset_mode=autoreset)
    ours = agentkit.make_vec("FrozenLake-v1", N, mode=mode, autoreset_mode=autoreset)
    rng, ended = np.random.default_rng(0), 0
    try:
        seeds: list[int | None] = [7, 8, 9]
        outcomes = [env.reset(seed=seeds) for env in (ours, theirs)]
        assert outcomes[0][0] == tuple(outcomes[1][0])
        assert same(outcomes[0][1], outcomes[1][1])
        for _ in range(120):
            actions = tuple(rng.choice(["Left", "Down", "Right", "Up"], size=N).tolist())
            results: list[Any] = [env.step(actions) for env in (ours, theirs)]
            (obs, *numbers, infos), (their_obs, *their_numbers, their_infos) = results
            assert [array.tolist() for array in numbers] == [array.tolist() for array in their_numbers]
            done = numbers[1] | numbers[2]
            # What chance begins next is drawn by each environment's own generator, the same in both.
            assert obs == tuple(their_obs)
            assert same(infos, their_infos)
            assert [array.dtype for array in numbers] == [np.float64, bool, bool]
            ended += int(done.sum())
            if autoreset is AutoresetMode.DISABLED and done.any():
                with pytest.raises(ResetNeeded, match="reset_mask"):
                    ours.step(actions)
                seed: list[int | None] = list(range(100 * ended, 100 * ended + N))
                begun = [env.reset(seed=seed, options={"reset_mask": done.copy()}) for env in (ours, theirs)]
                assert begun[0][0] == tuple(begun[1][0])
        assert ended > 5
    finally:
        ours.close()
        theirs.close()


def test_spaces_and_limits() -> None:
    with_limit = agentkit.make_vec("FrozenLake-v1", 2, max_steps=2)
    try:
        assert isinstance(with_limit.observation_space, Tuple)
        observations, _ = with_limit.reset(seed=1)
        assert with_limit.observation_space.contains(observations)
        assert with_limit.action_space.contains(with_limit.action_space.sample())
        *_, truncations, _ = [with_limit.step(("Left", "nonsense")) for _ in range(2)][-1]
        assert truncations.tolist() == [True, True]
        for actions in ("Up", ["Up"], ["Up"] * 3):
            with pytest.raises(ValueError, match="takes 2 texts"):
                with_limit.step(actions)
        with pytest.raises(ValueError, match="3 seeds for 2"):
            with_limit.reset(seed=[1, 2, 3])
        with pytest.raises(ValueError, match="reset_mask"):
            with_limit.reset(options={"reset_mask": np.zeros(2, dtype=bool)})
    finally:
        with_limit.close()
        with_limit.close()
    invalid: list[dict[str, Any]] = [{"num_envs": 0}, {"num_envs": 1, "max_steps": 0}]
    for wrong in (*invalid, {"num_envs": 1, "autoreset_mode": "never"}):
        with pytest.raises(ValueError, match=r"at least 1|never"):
            agentkit.make_vec("FrozenLake-v1", **wrong)
    with pytest.raises(ConfigError, match="mode='async' has none"):
        agentkit.make_vec("FrozenLake-v1", 1, sandbox_spec={"image": "x"})
    with pytest.raises(ConfigError, match="back end as mode"):
        agentkit.make_vec("FrozenLake-v1", 1, sandbox="docker")
    for mode in ("async", "process"):
        with pytest.raises(ConfigError, match="redundancy needs"):
            agentkit.make_vec("FrozenLake-v1", 1, mode=mode, redundancy=agentkit.Redundancy())
    for mode in MODES:
        with pytest.raises(RegistryError, match="did you mean"):
            agentkit.make_vec("FrozenLake-v1", 1, mode=mode, is_slipery=True)
    fresh = agentkit.make_vec("FrozenLake-v1", 1)
    with pytest.raises(ResetNeeded):
        fresh.step(["Up"])
    fresh.close()


@pytest.mark.parametrize(
    ("id", "mode", "faults"),
    [
        ("TestFaulty-v0", "process", ["raise", "die", "hang", "nan"]),
        ("TestThreaded-v0", "async", ["raise", "exit", "hang", "nan"]),
        ("TestWaiting-v0", "async", ["hang"]),
    ],
)
def test_a_failure_costs_its_own_episode(id: str, mode: str, faults: list[str]) -> None:
    vector = agentkit.make_vec(id, 3, mode=mode, step_timeout=1.0)
    try:
        vector.reset(seed=5)
        for fault in faults:
            observations, rewards, terminated, truncated, infos = vector.step(["on", fault, "on"])
            assert truncated.tolist() == [False, True, False], fault
            assert (observations[1], rewards[1], terminated.any()) == ("", 0.0, False)
            assert rewards[0] == rewards[2] > 0
            assert infos["_failure"].tolist() == [False, True, False]
            assert infos["failure"][1].startswith(("EnvCrashed", "EnvTimeout", "EnvContractError"))
            observations, rewards, _, truncated, infos = vector.step(["on"] * 3)
            assert observations[1].startswith(("begun", "count 0")), "a fresh environment began the next episode"
            assert not truncated.any()
            assert rewards.tolist()[1] == 0.0
            assert "failure" not in infos
    finally:
        start = time.monotonic()
        vector.close()
    assert time.monotonic() - start < 5
    while sum(thread.name.startswith("agentkit-vector") for thread in threading.enumerate()) > 1:  # the hung one stays
        assert time.monotonic() - start < 10
        time.sleep(0.01)


@pytest.mark.parametrize("autoreset", list(AutoresetMode), ids=lambda mode: mode.name)
def test_failure_is_reported_in_every_autoreset_mode(autoreset: AutoresetMode) -> None:
    vector = agentkit.make_vec("TestThreaded-v0", 2, autoreset_mode=autoreset)
    try:
        vector.reset(seed=5)
        *_, truncated, infos = vector.step(["on", "raise"])
        assert truncated.tolist() == [False, True]
        assert infos["failure"].tolist() == [None, "EnvCrashed: step raised KeyError: 'no such room'"]
        assert infos["_failure"].tolist() == [False, True]
        assert ("final_info" in infos) == (autoreset is AutoresetMode.SAME_STEP)
        if autoreset is not AutoresetMode.DISABLED:
            assert "failure" not in vector.step(["on", "on"])[-1]
    finally:
        vector.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_vector_stays_closed(mode: str) -> None:
    vector = agentkit.make_vec("FrozenLake-v1", 2, mode=mode)
    vector.reset(seed=0)
    vector.close()
    for use in (lambda: vector.step(["Up"] * 2), lambda: vector.reset(seed=0)):
        with pytest.raises(ClosedEnvironmentError, match="closed"):
            use()
    vector.close()


@pytest.mark.parametrize("mode", MODES)
def test_each_environment_is_begun_before_it_is_stepped(mode: str) -> None:
    vector = agentkit.make_vec("TestPicky-v0", 3, mode=mode)
    try:
        for begun, others in (([True, False, False], r"\[1, 2\]"), ([False, False, True], r"\[1\]")):
            vector.reset(seed=0, options={"reset_mask": np.array(begun)})
            with pytest.raises(ResetNeeded, match=others):
                vector.step(["on"] * 3)
        vector.reset(seed=0, options={"reset_mask": np.array([False, True, False])})
        assert vector.step(["on"] * 3)[1].tolist() == [0.5] * 3
        with pytest.raises(EnvCrashed, match=r"environment 1 of 3: reset raised ConfigError"):
            vector.reset(options={"reset_mask": np.array([False, True, False]), "word": "x"})
        with pytest.raises(ResetNeeded, match=r"\[1\]"):  # its episode is lost
            vector.step(["on"] * 3)
    finally:
        vector.close()


@pytest.mark.parametrize("mode", MODES)
def test_environment_that_cannot_be_made_gives_the_reason_in_every_mode(mode: str) -> None:
    with pytest.raises(ConfigError, match="word='x' must be 'count'"):
        agentkit.make_vec("TestPicky-v0", 2, mode=mode, word="x")
    with pytest.raises(ConfigError, match="plain data" if mode == "process" else "must be"):
        agentkit.make_vec("TestPicky-v0", 2, mode=mode, word=str.split)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": 3},
        {"mode": "local", "redundancy": {"spares": 1}},
        {"mode": "local", "sandbox_spec": 3},
        {"step_timeout": "1s"},
    ],
)
def test_arguments_of_a_wrong_type_are_errors(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"{list(wrong)[-1]}=.* must be"):
        agentkit.make_vec("FrozenLake-v1", 2, **wrong)
    for number in ("2", None, 2.0, 0):
        with pytest.raises(ValueError, match="must be integers, at least 1"):
            agentkit.make_vec("FrozenLake-v1", number)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", [*MODES, "local"])
def test_unencodable_action_affects_only_its_environment(mode: str) -> None:
    require(mode != "local" or shutil.which("bwrap") is not None, "install bubblewrap")
    vector = agentkit.make_vec("FrozenLake-v1", 2, mode=mode)
    try:
        vector.reset(seed=0)
        *_, infos = vector.step(["\ud800", "Right"])
        assert "failure" not in infos
        assert infos["action_valid"].tolist() == [False, True]
    finally:
        vector.close()


def test_environments_wait_together() -> None:
    vector = agentkit.make_vec("TestWaiting-v0", 50)
    try:
        vector.reset(seed=0)
        start = time.monotonic()
        vector.step(["on"] * 50)
        assert time.monotonic() - start < 2  # 10 s one after the other
    finally:
        vector.close()


@pytest.mark.slow
@pytest.mark.docker
def test_in_docker_the_episodes_are_the_same() -> None:
    require("docker", "pip install 'agentkit-rl[docker]'")
    vectors = [agentkit.make_vec("FrozenLake-v1", N, mode=mode) for mode in ("async", "docker")]
    try:
        played = [play(vector) for vector in vectors]
    finally:
        for vector in vectors:
            vector.close()
    assert played[0] == played[1]


def play(vector: TextVectorEnv) -> list[Any]:
    rng = np.random.default_rng(1)
    outcomes: list[Any] = [vector.reset(seed=3)[0]]
    for _ in range(20):
        observations, *numbers, _ = vector.step(rng.choice(["Left", "Down", "Right", "Up"], size=N).tolist())
        outcomes.append((observations, *(array.tolist() for array in numbers)))
    return outcomes
