"""Mixtures: the episodes of each domain, in the configured ratios, with the name of the domain."""

import asyncio
import threading
import time

import numpy as np
import pytest

import agentkit
from agentkit.config import EnvConfig
from agentkit.envs.base import TextEnv
from agentkit.envs.check import check
from agentkit.envs.countdown import Countdown
from agentkit.envs.frozen_lake import FrozenLake
from agentkit.envs.mixture import Mixture
from agentkit.envs.mixture.env import Domain
from agentkit.errors import ConfigError, RegistryError
from agentkit.trainers.rollout.counters import task_metrics
from agentkit.trainers.rollout.hosts import AsyncEnv
from agentkit.trainers.rollout.source import EnvSource
from agentkit.types import Trajectory

COUNTDOWN = {"id": "Countdown-v0", "kwargs": {"numbers": 3}, "weight": 3}
LAKE = {"id": "FrozenLake-v1", "weight": 1, "reward_scale": 0.5, "name": "lake"}
BOTH = [COUNTDOWN, LAKE]


class Threaded(TextEnv):
    """An environment that shows the thread in which it runs."""

    instructions = "Wait."
    concurrency = "thread"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return threading.current_thread().name, {"success": False, "action_valid": True}

    def step(self, action):
        time.sleep(0.2)
        info = {"success": True, "action_valid": True, "metrics": {"waited": 0.2}}
        return threading.current_thread().name, 1.0, True, False, info


class Hanging(Threaded):
    concurrency = "process"


async def test_an_episode_is_the_domains_own():
    env, own = Mixture(domains=BOTH), {"Countdown-v0": Countdown(numbers=3), "lake": FrozenLake()}
    rules = {"Countdown-v0": Countdown.instructions_for(numbers=3), "lake": FrozenLake.instructions_for()}
    seen = set()
    for seed in range(30):
        observation, info = await env.reset(seed=seed)
        label = info["domain"]
        seen.add(label)
        alone = own[label]
        assert observation == f"{rules[label].strip()}\n\n{alone.reset(seed=seed)[0]}"
        scale = 0.5 if label == "lake" else 1.0
        while True:
            action = next(env.expert())
            got, want = await env.step(action), alone.step(action)
            assert got[0] == want[0]
            assert got[1] == want[1] * scale
            assert got[2:4] == want[2:4]
            if got[2] or got[3]:
                break
        assert got[4]["metrics"] == {f"{label}/success": 1.0}
    assert seen == set(own)
    await env.close()


async def test_domains_come_in_their_ratios_and_not_with_their_tasks():
    env = Mixture(domains=[COUNTDOWN, {**COUNTDOWN, "name": "again", "weight": 1}])
    drawn, first = [], []
    for seed in range(2_000):
        _, info = await env.reset(seed=seed)
        drawn.append(info["domain"] == "again")
        first.append(np.random.default_rng(seed).random())
    share = float(np.mean(drawn))
    assert abs(share - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 2_000)
    # What the task is made of does not tell the domain: both begin with the same seed.
    assert abs(np.corrcoef(drawn, first)[0, 1]) < 4 / np.sqrt(2_000)
    assert [(await env.reset(seed=seed))[1]["domain"] == "again" for seed in range(50)] == drawn[:50]


async def test_a_domain_is_cut_off_at_its_own_turns():
    env = Mixture(domains=[LAKE])
    _, info = await env.reset(seed=0)
    for number in range(1, 101):
        *_, terminated, truncated, info = await env.step("nonsense")
        assert (terminated, truncated) == (False, number == FrozenLake.max_turns * FrozenLake.actions_per_turn)
    assert info["metrics"] == {"lake/success": 0.0}


async def test_blocking_domain_runs_in_one_thread():
    agentkit.register("Threaded-v0", "test_mixture:Threaded")
    env = Mixture(domains=[{"id": "Threaded-v0"}])
    observation, _ = await env.reset(seed=0)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    thread, *_, info = await env.step("x")
    ticking.cancel()
    await env.close()
    assert observation.endswith(thread)
    assert ticks >= 3
    assert info["metrics"] == {"Threaded-v0/waited": 0.2, "Threaded-v0/success": 1.0}


def test_wrong_mixtures_are_refused():
    agentkit.register("Hanging-v0", "test_mixture:Hanging")
    for domains, words in (
        ([], "needs domains"),
        (3, "^domains: .*list"),
        ("Countdown-v0", "^domains: .*list"),
        (COUNTDOWN, "^domains: .*list"),
        ([3], r"^domains\.0: "),
        ([COUNTDOWN, {**LAKE, "weight": 0}], r"^domains\.1\.weight: "),
        ([{"id": "Countdown-v0", "share": 1}], r"domains\.0\.share: "),
        ([COUNTDOWN, COUNTDOWN], "not all different"),
        ([{"id": "Hanging-v0"}], "sandbox"),
    ):
        with pytest.raises(ConfigError, match=words):
            agentkit.make("Mixture-v0", domains=domains)
    with pytest.raises(ConfigError, match="needs domains"):
        agentkit.make("Mixture-v0")
    assert [d.label for d in Mixture(domains=(Domain(id="Countdown-v0"), LAKE)).domains] == ["Countdown-v0", "lake"]
    with pytest.raises(RegistryError, match="Countdown-v0"):
        Mixture(domains=[{"id": "Countdwn-v0"}])
    with pytest.raises(RegistryError, match="numbers"):
        Mixture(domains=[{"id": "Countdown-v0", "kwargs": {"number": 3}}])


async def test_in_a_run_each_domain_has_its_success():
    source = EnvSource.of(EnvConfig(id="Mixture-v0", kwargs={"domains": BOTH}))
    assert (source.where, source.max_turns, source.has_expert) == ("async", FrozenLake.max_turns, True)
    handle, episodes = AsyncEnv(source), []
    for seed in range(12):
        observation = await handle.reset(seed)
        trajectory = Trajectory(seed, 0, source.id, seed, version_started=0)
        action = "1" if "Target" in observation else "nonsense"
        trajectory.metrics.update({f"task/{name}": v for name, v in (await handle.act([action])).metrics.items()})
        episodes.append(trajectory)
    await handle.close()
    assert task_metrics(episodes) == {"task/Countdown-v0/success": 0.0, "task/lake/success": 0.0}


def test_it_passes_its_checks():
    results = check("Mixture-v0", domains=BOTH)
    assert [result for result in results if not result.passed] == []
