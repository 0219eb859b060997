"""``sandbox=…`` of environments that create sandboxes themselves selects the back end of those sandboxes."""

import asyncio
import shutil
from typing import Any

import pytest
from requiring import require

import agentkit
from agentkit import registry
from agentkit.config import EnvConfig, HealthConfig
from agentkit.envs import shared_resources
from agentkit.envs.code_contest import CodeContest
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.mixture import Mixture
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import ConfigError, RegistryError
from agentkit.trainers.rollout.source import EnvSource

BACKENDS = ["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])]


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "local":
        require(shutil.which("bwrap") is not None, "install bubblewrap")
    else:
        require("docker", "pip install 'agentkit-rl[docker]'")
    return request.param


def test_programs_go_into_the_sandbox_that_was_asked_for(backend):
    env = agentkit.make("CodeContest-v0", sandbox=backend)
    assert isinstance(env, CodeContest), "it holds the expected outputs, so it is in this process"
    blocking = SyncTextEnv(env)
    try:
        blocking.reset(seed=0)
        assert blocking.step(next(blocking.expert()))[1] == 1.0
        assert [key[1] for key in _pools()] == [backend]
    finally:
        blocking.close()


def test_a_vector_of_them(backend):
    vector = agentkit.make_vec("CodeContest-v0", 2, mode=backend, step_timeout=120.0)
    try:
        vector.reset(seed=0)
        programs = []
        for seed in range(2):
            env = CodeContest()
            asyncio.run(env.reset(seed=seed))
            programs += list(env.expert())
        assert vector.step(programs)[1].tolist() == [1.0, 1.0]
    finally:
        vector.close()


async def test_a_part_of_a_mixture():
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    env = Mixture(domains=[{"id": "CodeContest-v0", "sandbox": "local"}])
    try:
        await env.reset(seed=0)
        assert (await env.step(next(env.expert())))[1] == 1.0
        assert [key[1] for key in _pools()] == ["local"]
    finally:
        await env.close()


def test_a_run_is_configured_by_env_sandbox():
    source = EnvSource.of(EnvConfig(id="CodeContest-v0", sandbox="local"))
    assert (source.where, source.kwargs["backend"], source.cls) == ("async", "local", CodeContest)
    for id, kwargs in (("SWEBench-v0", {}), ("Math-v0", {"tools": True})):
        assert registry.arguments_here(id, kwargs, "docker") == {**kwargs, "backend": "docker"}
    servers = EnvConfig(id="CodeContest-v0", sandbox="remote", servers=("https://one:1", "https://two:2"))
    assert EnvSource.of(servers).kwargs["backend"] == "remote:https://one:1,https://two:2"
    for id in ("Math-v0", "Sokoban-v0", "Nobody-knows-v0"):
        assert registry.arguments_here(id, {}, "docker") is None, "it is put into one as a whole"


def test_settings_of_a_run_reach_the_pools_of_programs():
    config = EnvConfig(
        id="CodeContest-v0", sandbox="local", spares=3, hedge="p95", health=HealthConfig(ping_interval=1.0)
    )
    wanted = EnvSource.of(config).kwargs["redundancy"]
    assert (wanted.spares, wanted.hedge, wanted.health.ping_interval, wanted.recovery) == (3, "p95", 1.0, None)


async def test_redundancy_of_programs():
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    env = agentkit.make("CodeContest-v0", sandbox="local", redundancy=Redundancy(spares=2))
    try:
        await env.reset(seed=0)
        assert (await env.step(next(env.expert())))[1] == 1.0
        (opened,) = shared_resources._open.values()
        pool: Any = vars(opened.resource)["_pool"]
        assert pool._settings.min_idle == 3, "one sandbox, and two spares"
    finally:
        await env.close()


def test_environments_with_own_sandboxes_are_not_replayed():
    with pytest.raises(ConfigError, match="CodeContest makes its sandboxes itself"):
        agentkit.make("CodeContest-v0", redundancy=Redundancy(recovery="replay"))
    wrong: Any = {"spares": 1}
    with pytest.raises(ConfigError, match=r"must be an agentkit\.Redundancy"):
        agentkit.make("CodeContest-v0", redundancy=wrong)
    with pytest.raises(ConfigError, match=r"must be an agentkit\.Redundancy"):
        EnvSource.of(EnvConfig(id="CodeContest-v0", kwargs={"redundancy": wrong}))
    for id in ("CodeContest-v0", "SWEBench-v0"):
        with pytest.raises(ConfigError, match="must be the name of a back end"):
            agentkit.make(id, backend=3)
        with pytest.raises(ConfigError, match=r"must be an agentkit\.Redundancy"):
            agentkit.env_class(id)(redundancy=wrong)
    math = EnvConfig(id="Math-v0", kwargs={"tools": True}, sandbox="docker")
    for settings in ({"recovery": "replay"}, {"standbys": 1}):
        with pytest.raises(ConfigError, match="Math makes its sandboxes itself"):
            EnvSource.of(math.model_copy(update=settings))


def test_contradicting_arguments_are_rejected():
    with pytest.raises(ConfigError, match="sandbox='docker' and backend='local' contradict"):
        agentkit.make("CodeContest-v0", sandbox="docker", backend="local")
    spec: Any = {"image": "mine"}
    with pytest.raises(ConfigError, match="its own specification"):
        agentkit.make("CodeContest-v0", sandbox="docker", sandbox_spec=spec)
    with pytest.raises(ConfigError, match="its own specification"):
        agentkit.make_vec("SWEBench-v0", 2, mode="docker", sandbox_spec=spec)
    with pytest.raises(ConfigError, match="its own specification"):
        EnvSource.of(EnvConfig(id="CodeContest-v0", sandbox="docker", sandbox_spec=spec))


def test_environment_with_own_sandboxes_is_rejected_inside_a_sandbox():
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    agentkit.register("Own-v0", "faulty_envs:Own")
    with pytest.raises(RegistryError, match="leave `sandbox` out, and name the back end as `where`"):
        agentkit.make("Own-v0", sandbox="local")


def test_a_package_that_a_sandbox_lacks_is_named_with_the_remedy(tmp_path, monkeypatch):
    require(shutil.which("bwrap") is not None, "install bubblewrap")
    (tmp_path / "lacking_env.py").write_text("from surely_not_there import Lacking\n")
    monkeypatch.syspath_prepend(tmp_path)
    agentkit.register("Lacking-v0", "lacking_env:Lacking")
    with pytest.raises(RegistryError, match="has no surely_not_there: `agentkit sandbox build --package`"):
        agentkit.make("Lacking-v0", sandbox="local")


def _pools() -> list[Any]:
    """Return the back ends and memory sizes of existing sandboxes for programs."""
    keys: list[Any] = list(shared_resources._open)
    return [key for key in keys if key[0] == "programs"]
