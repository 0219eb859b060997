"""The images of sandboxes: their content, and environments that run in them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from docker_boxes import WatchedDocker, make, request, spec

from agentkit import registry
from agentkit.envs.isolation import image
from agentkit.errors import ImageError
from agentkit.sandboxes.images import build as images
from agentkit.sandboxes.spec import DEFAULT_IMAGE

PLAY = """
import json, sys
import agentkit
env = agentkit.make("FrozenLake-v1")
seen = [env.reset(seed=7)[0]] + [env.step(action)[0] for action in ("left", "up")]
print(json.dumps([seen, sorted(set(sys.modules) & {"torch", "transformers"})]))
"""


def test_the_image_gets_the_files_of_the_running_agentkit() -> None:
    files = dict(image._own_files())
    assert {"agentkit/__init__.py", "agentkit/envs/base.py", "agentkit/sandboxes/agent/agent.py"} <= files.keys()
    assert not [name for name in files if name.startswith("agentkit/trainers") or name.endswith(".pyc")]
    assert files["agentkit/sandboxes/images/build.py"] == Path(images.__file__).read_bytes()
    entry_points = next(data for name, data in files.items() if name.endswith("/entry_points.txt"))
    assert b"FrozenLake-v1" in entry_points
    assert any(name.endswith(".dist-info/METADATA") and b"Name: agentkit" in data for name, data in files.items())


def test_a_build_context_does_not_depend_on_the_user(tmp_path: Path) -> None:
    (tmp_path / "site" / "p").mkdir(parents=True, mode=0o700)
    (tmp_path / "site" / "p" / "m.py").write_text("x = 1")
    (tmp_path / "site" / "p" / "m.py").chmod(0o600)
    packed = io.BytesIO()
    images._pack(packed, b"FROM scratch", tmp_path / "site")
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        found = {member.name: (member.mode, member.uid) for member in archive}
    assert found == {
        "Dockerfile": (0o644, 0),
        "site": (0o755, 0),
        "site/p": (0o755, 0),
        "site/p/m.py": (0o644, 0),
    }


def test_digests_differ_when_parts_differ() -> None:
    assert images._digest("ab", "c") != images._digest("a", "bc")
    assert images._digest("a") == images._digest(b"a")


def test_a_package_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(ImageError, match="pip install no-such-distribution"):
        image._version("no-such-distribution")


@pytest.mark.docker
async def test_the_base_is_not_built_twice(docker_backend: WatchedDocker) -> None:
    first = images.build_base()
    assert images.build_base() == first
    with pytest.raises(ImageError, match="agentkit sandbox build"):
        images.build_base("agentkit/no-such-base")
    with pytest.raises(ImageError, match="choose another base"):
        images.build_base("127.0.0.1:1/no/base:1")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_environments_play_in_their_image_as_they_play_here(
    docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list(image._own_files())
    monkeypatch.setattr(image, "_own_files", lambda: files)
    built = image.build_env_image()
    assert image.build_env_image() == built
    env = registry.make("FrozenLake-v1")
    here = [env.reset(seed=7)[0], *(env.step(action)[0] for action in ("left", "up"))]
    _, channel = await make(docker_backend, spec(image=image.ENV_IMAGE))
    result = await channel.exec(request("python3", "-c", PLAY))
    assert result.ok, result.stderr
    assert json.loads(result.stdout) == [here, []]
    await docker_backend.clear()


@pytest.mark.docker
@pytest.mark.slow
async def test_a_base_without_python_is_refused(docker_backend: WatchedDocker) -> None:
    for broken in (b'FROM scratch\nCMD ["/none"]\nCOPY Dockerfile /\n', b"FROM %s\nUSER 0\nRUN rm /usr/bin/python3\n"):
        recipe = broken % DEFAULT_IMAGE.encode() if b"%s" in broken else broken
        client = images.make_client()
        tag = "agentkit/test-no-python"
        try:
            images._build(client, tag, images._digest(recipe), recipe, lambda _: {})
            with pytest.raises(ImageError, match="python3"):
                image.build_env_image(tag, tag="agentkit/test-env")
        finally:
            client.remove_image(tag, force=True)
            client.close()
