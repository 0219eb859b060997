"""AlfWorld-v0 in a container: its image, and the same episode as in this process."""

import pytest
from requiring import require

import agentkit
from agentkit.envs.alfworld import alfworld_package
from agentkit.errors import EngineUnavailable, ImageError

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]
IMAGE = "agentkit/env-alfworld"


@pytest.fixture(scope="module")
def image():
    require("alfworld", alfworld_package.REMEDY)
    require("docker", "pip install 'agentkit-rl[docker]'")
    from agentkit.envs.isolation.image import build_env_image

    try:
        build_env_image(packages=("alfworld",), tag=IMAGE)
    except (EngineUnavailable, ImageError) as error:
        require(False, f"run .ci/docker, which starts an engine and builds the base image ({error})")
    return IMAGE


@pytest.mark.parametrize("expert", ["planner", "handcoded"])
def test_the_same_episode_inside_and_outside(image, expert, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    here = agentkit.make("AlfWorld-v0", split="valid_seen", expert=expert)
    there = agentkit.make(
        "AlfWorld-v0", split="valid_seen", expert=expert, sandbox="docker", sandbox_spec={"image": image}
    )
    there._env._reset_timeout = there._env._step_timeout = 300.0  # on a machine that does many other things
    try:
        assert there.reset(seed=3) == here.reset(seed=3)
        for _ in range(40 if expert == "planner" else 6):  # rules of thumb may look around for long
            plan = list(here.expert())
            assert list(there.expert()) == plan
            said = here.step(plan[0])
            assert there.step(plan[0]) == said
            if said[2]:
                break
        else:
            assert expert == "handcoded"
    finally:
        there.close()
        here.close()
