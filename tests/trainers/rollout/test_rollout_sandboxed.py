"""The rollout loop with environments in sandboxes: recovery of episodes whose environment died."""

from pathlib import Path

import pytest
from requiring import require
from rollout_envs import Plain, Puppet, Unsteady
from rollout_harness import Harness, configure

from agentkit import registry
from agentkit.config import EnvConfig, HealthConfig, RunConfig
from agentkit.errors import ConfigError, EngineUnavailable
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.trainers.rollout.source import EnvSource


@pytest.fixture
async def local_sandboxes(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    yield
    left = await backend.list({})
    await backend.close()
    assert left == []


def rewards(groups):
    return sorted((group.seed, round(member.reward, 6)) for group in groups for member in group.members)


async def play(config, steps=2):
    harness = Harness(config)
    await harness.loop.start()
    try:
        batches = [await harness.step() for _ in range(steps)]
    finally:
        await harness.loop.close()
    return harness, batches


async def test_batches_from_sandboxes_are_those_from_this_process(local_sandboxes):
    settings = {"sandbox": "local", "reset_timeout": 300.0}
    harness, there = await play(configure(settings=settings))
    _, here = await play(configure())
    assert [rewards(batch) for batch in there] == [rewards(batch) for batch in here]
    assert harness.loop._pool.source.where == "sandbox"
    pids = {turn.observation.split("pid ")[1] for batch in there for g in batch for m in g.members for turn in m.turns}
    assert len(pids) == 1  # it declares to run inline, so that all share a sandbox


async def test_an_environment_that_fails_inside_is_retried(local_sandboxes):
    env = {"how": "crash", "at": 2, "share": 0.5}
    config = configure(env, settings={"sandbox": "local", "reset_timeout": 300.0}, rollout={"retries": 1})
    harness, _ = await play(config, steps=1)
    voided = [trajectory for trajectory, ending, _ in harness.ends if ending == "voided"]
    assert all("KeyError" in trajectory.reason for trajectory in voided if trajectory.reason)


@pytest.mark.parametrize(("cls", "comes_back"), [(Plain, True), (Puppet, False)])
async def test_an_episode_that_died_comes_back_if_it_goes_the_same_way(cls, comes_back, tmp_path: Path):
    registry.register(f"{cls.__name__}-v0", cls)
    env = {"how": "die", "at": 2, "once": str(tmp_path / "died")}
    settings = {"id": f"{cls.__name__}-v0", "concurrency": "process", "recovery": "replay"}
    harness, _ = await play(configure(env, settings=settings, rollout={"retries": 5}), steps=1)
    assert (harness.loop.metrics()["rollout/env_replays"] > 0) is comes_back
    voided = [trajectory.reason for trajectory, ending, _ in harness.ends if ending == "voided"]
    if comes_back:
        assert voided == []
    else:  # the puppet's text holds its process id
        assert any("its replay differs" in reason for reason in voided)


async def test_voided_episodes_are_not_retried(tmp_path: Path):
    env = {"how": "crash", "at": 1, "share": 0.3}
    harness, _ = await play(configure(env, settings={"recovery": "void"}), steps=2)
    assert all(trajectory.attempt == 0 for trajectory, _, _ in harness.ends)
    assert any(ending == "voided" for _, ending, _ in harness.ends)


def test_replay_of_what_is_not_deterministic_is_refused():
    registry.register("Unsteady-v0", Unsteady)
    config = RunConfig.model_validate({"env": {"id": "Unsteady-v0", "recovery": "replay"}})
    with pytest.raises(ConfigError, match=r"env\.recovery"):
        EnvSource.of(config.env)


def test_the_recovery_follows_the_environment():
    registry.register("Unsteady-v0", Unsteady)
    registry.register("Plain-v0", Plain)
    assert EnvSource.of(EnvConfig(id="Plain-v0")).recovery == "replay"
    assert EnvSource.of(EnvConfig(id="Unsteady-v0")).recovery == "retry"
    own = EnvSource.of(EnvConfig(id="Math-v0", kwargs={"tools": True}))
    assert own.recovery == "retry", "its sandboxes run programs of the policy"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox_spec": {"image": "mine"}}, "env.sandbox_spec needs a sandbox"),
        ({"sandbox": "local", "concurrency": "thread"}, "contradict"),
        ({"sandbox": "locl"}, "'none', 'local', 'docker' or 'remote'"),
        ({"servers": ("https://a:1",)}, "env.servers needs env.sandbox=remote, and it is none"),
        ({"sandbox": "remote", "servers": ()}, "the list is empty"),
        ({"sandbox": "remote", "servers": ("https://a:1", "https://a:1/")}, "listed twice"),
        ({"sandbox": "remote", "servers": ("a:1",)}, "'a:1' is not the URL of a server"),
        ({"sandbox": "remote", "servers": ("https://token@a:1",)}, "AGENTKIT_SANDBOX_TOKEN or a token file"),
        ({"standbys": 1}, "env.standbys=1 needs a sandbox"),
        ({"sandbox": "local", "standbys": 1, "recovery": "retry"}, "env.standbys=1 and env.recovery=retry contradict"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"env": {"id": "FrozenLake-v1", **settings}})


def test_the_defaults_of_health_checks_are_those_of_pools():
    assert HealthPolicy(**HealthConfig().model_dump()) == HealthPolicy()
