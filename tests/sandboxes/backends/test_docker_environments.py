"""Environments in containers: their image, and the same episodes as in this process."""

import asyncio
import os

import pytest
from requiring import require

import agentkit
from agentkit.envs.isolation.allocator import SandboxAllocator
from agentkit.envs.isolation.env import SandboxedEnv
from agentkit.envs.isolation.placement import place
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.errors import EnvCrashed, ImageError
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec

PATIENCE = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]  # the image is built first


def box_of(env: SandboxedEnv) -> Sandbox:
    assert env._env.target is not None
    return env._env.target.sandbox.lease.box


@pytest.fixture(scope="module")
def env_image():
    """The image of this checkout's environments."""
    require("docker", "pip install 'agentkit-rl[docker]'")
    from agentkit.envs.isolation.image import ENV_IMAGE, build_env_image

    try:
        build_env_image()
    except ImageError as error:
        require(False, f"run .ci/docker, which builds the base image ({error})")
    return ENV_IMAGE


@pytest.mark.parametrize("id", ["Sokoban-v0", "FrozenLake-v1", "Countdown-v0"])
async def test_the_same_episode_as_in_process(id, env_image, docker_backend):
    there = SandboxedEnv(id, sandbox=docker_backend, sandbox_spec=SandboxSpec(image=env_image), reset_timeout=300.0)
    here = agentkit.make(id)
    try:
        assert await there.reset(seed=5) == here.reset(seed=5)
        assert box_of(there).info.loosened == ()
        for action in ("Up", "Right", "Down", "1 + 1"):
            said = await there.step(action)
            assert said == here.step(action)
            if said[2] or said[3]:
                break
    finally:
        await there.close()


async def test_a_container_that_is_removed_is_replaced_and_the_episode_goes_on(env_image, docker_backend):
    env = SandboxedEnv("Sokoban-v0", sandbox=docker_backend, reset_timeout=300.0)
    here = agentkit.make("Sokoban-v0")
    try:
        assert await env.reset(seed=5) == here.reset(seed=5)
        assert await env.step("Up") == here.step("Up")
        await docker_backend.remove(box_of(env).id)
        assert await env.step("Right") == here.step("Right")
    finally:
        await env.close()


@pytest.mark.parametrize(
    ("how", "standbys", "by", "bound"),
    [("kill", 0, "spare", 1.0), ("kill", 1, "standby", 0.1), ("pause", 0, "spare", 5.0)],
)
async def test_an_episode_goes_on_in_time(how, standbys, by, bound, env_image, docker_backend):
    placed = place("FrozenLake-v1", {}, docker_backend, SandboxSpec(image=env_image))
    allocator = SandboxAllocator(placed, Redundancy(spares=1, standbys=standbys), make_timeout=300.0)
    env, here = SandboxedEnv("FrozenLake-v1", allocator=allocator, reset_timeout=300.0), agentkit.make("FrozenLake-v1")
    loop = asyncio.get_running_loop()
    seconds = []
    try:
        for _ in range(3):
            assert await env.reset(seed=5) == here.reset(seed=5)
            assert await env.step("Up") == here.step("Up")
            for _ in range(600):
                followers = env._env._standbys.caught_up() if env._env._standbys is not None else []
                if allocator.spares == 1 and len(followers) == standbys:
                    break
                await asyncio.sleep(0.1)
            victim, start = box_of(env).id, loop.time()
            await docker_backend.engine.call(how, lambda client, id=victim: getattr(client, how)(id))
            assert await env.step("Left") == here.step("Left")
            seconds.append(loop.time() - start)
        log = allocator.log.recent
        print(f"{how}, {by}: {[round(one, 3) for one in seconds]} s, of which {[round(one.seconds, 3) for one in log]}")
        assert {recovery.by for recovery in log} == {by}
        assert min(recovery.seconds for recovery in log) < bound
        assert min(seconds) < bound + 1.0  # the engine takes time to kill it
    finally:
        await env.close()
        await allocator.close()


async def test_a_frozen_container_costs_an_eighth_of_the_episodes_at_most(env_image, docker_backend):
    placed = place("Sokoban-v0", {}, docker_backend, SandboxSpec(image=env_image))
    allocator = SandboxAllocator(placed, Redundancy(recovery="retry", share=64, spread=8))
    envs = [SandboxedEnv("Sokoban-v0", allocator=allocator, reset_timeout=300.0) for _ in range(16)]
    clock = asyncio.get_running_loop().time
    crashes: list[tuple[int, float, str]] = []
    stop = asyncio.Event()

    async def play(number: int) -> None:
        await envs[number].reset(seed=number)
        ready.append(number)
        while not stop.is_set():
            try:
                *_, terminated, truncated, _ = await envs[number].step("Up")
                if terminated or truncated:
                    await envs[number].reset(seed=number)
            except EnvCrashed as error:
                crashes.append((number, clock(), str(error)))
                return
            await asyncio.sleep(0.1)

    ready: list[int] = []
    players = [asyncio.ensure_future(play(number)) for number in range(16)]
    try:
        while len(ready) < 16:
            await asyncio.sleep(0.1)
            assert not crashes
        boxes = [box_of(env) for env in envs]
        victim = max(boxes, key=boxes.count)
        inside = [number for number, env in enumerate(envs) if box_of(env) is victim]
        rss = (await victim.stats()).memory
        start = clock()
        await docker_backend.engine.call("pause", lambda client: client.pause(victim.id))
        while len(crashes) < len(inside):
            await asyncio.sleep(0.05)
            assert clock() - start < 5 * PATIENCE
        print(
            f"{len(crashes)} of 16 lost after {crashes[-1][1] - start:.2f} s ({crashes[-1][2]}); {rss} bytes a sandbox"
        )
        await asyncio.sleep(1)
        assert sorted(number for number, _, _ in crashes) == inside
        assert len(inside) <= 2
    finally:
        stop.set()
        await asyncio.gather(*players)
        await asyncio.gather(*(env.close() for env in envs))
        await allocator.close()


@pytest.mark.parametrize("mode", ["text", "compact"])
async def test_a_shop_is_the_same_inside(mode, env_image, docker_backend, tmp_path, monkeypatch):
    require("bm25s", "pip install 'agentkit-rl[webshop]'")
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    arguments = {"observation_mode": mode, "nouns": "tokens"}
    spec = SandboxSpec(image=env_image)
    there = SandboxedEnv("WebShop-v0", arguments, sandbox=docker_backend, sandbox_spec=spec, reset_timeout=300.0)
    here = agentkit.make("WebShop-v0", **arguments)
    try:
        for seed in range(3):
            assert await there.reset(seed=seed) == here.reset(seed=seed)
            assert await there.plan() == list(here.expert())
            for action in ("search[<r>]", "click[next >]", "nothing"):
                assert await there.step(action) == here.step(action)
            said = None
            for action in list(here.expert()):
                said = await there.step(action)
                assert said == here.step(action)
            assert said is not None
            assert said[4]["success"]
    finally:
        await there.close()
