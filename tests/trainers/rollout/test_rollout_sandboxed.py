"""The rollout loop with environments in sandboxes: recovery of episodes whose environment died."""

from pathlib import Path

import pytest
from requiring import require
from rollout_envs import Plain, Puppet, Unsteady
from rollout_harness import Harness, configure

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.errors import ConfigError, EngineUnavailable
from agentkit.sandboxes.backends.local.backend import LocalBackend
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
    assert harness.loop._player.rules.source.where == "sandbox"
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
    assert harness.loop.metrics()["rollout/env_replays"] > 0
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sandbox_spec": {"image": "mine"}}, "env.sandbox_spec needs a sandbox"),
        ({"sandbox": "local", "concurrency": "thread"}, "contradict"),
        ({"sandbox": "locl"}, "'none', 'local' or 'docker'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"env": {"id": "FrozenLake-v1", **settings}})
