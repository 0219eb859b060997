"""OpenEnv's own package: its client and TRL with agentkit's server, agentkit's client with a server of `openenv init`.

The package lives in a separate environment, which `.ci/openenv --install-only` creates.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openenv_threads import serving
from requiring import require

import agentkit
from agentkit.envs.base import expert_actions
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import EnvCrashed, EnvError, EnvTimeout

pytestmark = [pytest.mark.openenv, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PYTHON = Path(os.environ.get("AGENTKIT_OPENENV_PYTHON", ROOT / ".venv-openenv" / "bin" / "python"))


@pytest.fixture(autouse=True)
def _installed() -> None:
    require(PYTHON.exists(), "run .ci/openenv --install-only, or set AGENTKIT_OPENENV_PYTHON")


def run(*arguments: object, cwd: Path | None = None, timeout: float = 300) -> str:
    """Run OpenEnv's interpreter, and return its output."""
    command = [str(PYTHON), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_their_client_plays_our_environments() -> None:
    here = agentkit.make("Sokoban-v0")
    plans, expected = {}, {}
    for seed in range(4):
        first, _ = here.reset(seed=seed)
        texts, rewards, plans[str(seed)] = [first], [], []
        for action in expert_actions(here):
            observation, reward, done, _, _ = here.step(action)
            plans[str(seed)].append(action)
            texts.append(observation)
            rewards.append(reward)
            if done:
                break
        expected[str(seed)] = texts, rewards
    with serving("Sokoban-v0") as url:
        played = json.loads(run(TESTS / "openenv_player.py", url, json.dumps(plans)))
    for way in ("sync", "async"):
        for seed, (texts, rewards) in expected.items():
            there = played[way][seed]
            assert (there["texts"], there["rewards"], there["done"]) == (texts, rewards, True)
            assert (there["metadata"]["success"], there["metadata"]["truncated"]) == (True, False)
            assert there["state"] == {"episode_id": seed, "step_count": len(rewards)}
    assert "send a reset first (code: VALIDATION_ERROR)" in played["errors"][0]
    assert "text: Field required" in played["errors"][1]


def test_our_server_passes_their_validation() -> None:
    with serving("FrozenLake-v1") as url:
        said = run("-m", "openenv.cli", "validate", "--url", url)
    assert "FAIL" not in said
    assert "PASS" in said


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of `openenv init`, with words on which its environment ends, fails and dies."""
    folder = tmp_path_factory.mktemp("openenv")
    run("-m", "openenv.cli", "init", "echo_room", cwd=folder)
    file = folder / "echo_room" / "server" / "echo_room_environment.py"
    code, anchor = file.read_text(encoding="utf-8"), "        message = action.message\n"
    assert code.count(anchor) == 1
    words = """        if message == "fail":
            raise KeyError("no such room")
        if message == "die":
            import os
            os._exit(3)
"""
    code = code.replace(anchor, anchor + words)
    ends = 'done=message == "end",\n            reward=reward'
    code = code.replace("done=False,\n            reward=reward", ends)
    assert ends in code
    file.write_text(code, encoding="utf-8")
    return folder / "echo_room"


@pytest.fixture
def theirs(generated: Path) -> Iterator[str]:
    """The address of their server, with one session as generated."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, cwd=generated, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 90
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def theirs_made(url: str, **kwargs: Any) -> SyncTextEnv:
    return SyncTextEnv(agentkit.make(f"openenv:{url}", **kwargs))


def test_we_play_a_server_of_openenv_init(theirs: str) -> None:
    env = theirs_made(theirs)
    assert "An action is a text: Message to echo back" in env.instructions
    text, info = env.reset(seed=3)
    assert json.loads(text) == {"echoed_message": "Echo Room environment ready!", "message_length": 0}
    assert (info["success"], info["action_valid"]) == (False, True)
    text, reward, terminated, truncated, info = env.step("hello \U0001f642\n")
    assert json.loads(text) == {"echoed_message": "hello \U0001f642\n", "message_length": 8}
    assert (terminated, truncated, info["step"]) == (False, False, 1)
    assert reward == pytest.approx(0.8)
    _, reward, terminated, _, info = env.step("end")
    assert (terminated, info["success"]) == (True, True)  # its return is over 1
    # One session: another environment waits for it, in vain and in time.
    other = theirs_made(theirs, capacity_timeout=0.5)
    with pytest.raises(EnvTimeout, match="no free session"):
        other.reset(seed=0)
    env.close()
    assert other.reset(seed=0)[0]
    with pytest.raises(EnvCrashed, match=r"'EXECUTION_ERROR': .*no such room"):
        other.step("fail")
    assert other.reset(seed=1)[0]
    with pytest.raises(EnvCrashed, match=r"the connection to .* failed"):
        other.step("die")
    with pytest.raises(EnvError):
        other.reset(seed=1)
    other.close()


def test_vectors_and_commands_play_their_server(theirs: str) -> None:
    vector = agentkit.make_vec(f"openenv:{theirs}", 1, max_steps=2)
    vector.reset(seed=0)
    vector.step(["a"])
    _, rewards, _, truncations, _ = vector.step(["bc"])
    vector.close()
    assert rewards == pytest.approx(np.array([0.2]))
    assert truncations.all()
    command = [sys.executable, "-m", "agentkit", "env"]
    said = subprocess.run(
        [*command, "play", f"openenv:{theirs}"], input="hi\nend\n", capture_output=True, text=True, check=True
    ).stdout
    assert '"echoed_message": "hi"' in said
    checked = subprocess.run([*command, "check", f"openenv:{theirs}"], capture_output=True, text=True, check=False)
    assert re.search(r"(\d+) of \1 checks passed", checked.stdout), checked.stdout


def test_a_run_trains_on_a_server(tmp_path: Path) -> None:
    with serving("FrozenLake-v1", max_sessions=8) as url:
        result = agentkit.train(
            {
                "name": "served",
                "dir": str(tmp_path / "run"),
                "steps": 2,
                "env": {"id": f"openenv:{url}", "max_turns": 2},
                "engine": {"max_batch": 8, "max_context": 512},
                "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6},
                "evaluation": {"episodes": 2},
            }
        )
    assert result.finished
    assert sum(row["env/failures"] for row in result.history) == 0


def test_trl_trains_on_our_server(tmp_path: Path) -> None:
    packages = sysconfig.get_paths()["purelib"]
    with serving("FrozenLake-v1") as url:
        said = run(TESTS / "openenv_trl.py", packages, url, tmp_path)
    result = json.loads(said.splitlines()[-1])
    assert result["actions"]
    assert result["changed"]
    steps = [entry for entry in result["log"] if "grad_norm" in entry]
    assert len(steps) == 2
    assert any(entry["grad_norm"] > 0 for entry in steps)
