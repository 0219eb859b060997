"""The adapter in verifiers' own code: its environment server and client, interactions, traces, and its command.

verifiers lives in a separate environment, which `.ci/adapters --install-only` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chat_stub import answer
from fragile_lake import PaidLake
from lake_replay import assert_replays
from requiring import require

from agentkit.envs.frozen_lake import FrozenLake

pytestmark = [pytest.mark.adapters, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTKIT_VERIFIERS_PYTHON", ROOT / ".venv-verifiers" / "bin" / "python"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require(PYTHON.exists(), "run .ci/adapters --install-only, or set AGENTKIT_VERIFIERS_PYTHON")
    command = [PYTHON, ROOT / "tests" / "verifiers_player.py", tmp_path_factory.mktemp("verifiers")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_same(episode: dict[str, Any], env: FrozenLake, turns: int = 4) -> None:
    """Play the answers of an episode again in ``env``: texts, reward and metrics must be the same."""
    assert episode["ok"]
    (system, instructions), *others = episode["messages"]
    assert system == "system"
    assert env.instructions.strip() in instructions
    texts = [text for _, text in others]
    assert [role for role, _ in others] == ["user", "assistant"] * (len(others) // 2)
    assert episode["sampled"] == [role == "assistant" for role, _ in episode["messages"]]
    reward, metrics = assert_replays(texts[::2], texts[1::2], env, episode["seed"], turns)
    assert episode["rewards"] == {"reward": pytest.approx(reward)}
    assert episode["metrics"] == metrics
    for k, said in enumerate(texts[1::2]):  # the model received the whole conversation
        before = [{"content": text} for _, text in episode["messages"][: 2 * k + 2]]
        assert said == answer(before)


def test_rewards_are_those_of_the_environment(played: Any) -> None:
    for episode in played["lake"]["episodes"] + played["sandboxed"]["episodes"]:
        assert_same(episode, FrozenLake(split="train"))
        assert episode["key"] == f"FrozenLake-v1#{episode['seed']}"
    assert [episode["seed"] for episode in played["lake"]["episodes"]] == [0, 3, 8]
    assert any(episode["metrics"]["invalid_turns"] for episode in played["lake"]["episodes"])
    assert any(episode["metrics"]["turns"] > 1 for episode in played["lake"]["episodes"])


def test_a_failed_environment_is_replaced_and_its_actions_repeated(played: Any) -> None:
    for episode in played["replayed"]["episodes"]:
        assert_same(episode, PaidLake(size=2))
        assert episode["errors"] == episode["episode_errors"] == []


def test_a_failure_is_an_error_on_the_trace_and_never_a_reward(played: Any) -> None:
    good, bad = played["failed"]["episodes"]
    assert_same(good, PaidLake(size=2))
    assert not bad["ok"]
    assert bad["rewards"] == bad["metrics"] == {}
    assert bad["errors"][0].startswith("EnvCrashed: step raised OSError: its world is gone")
    assert bad["episode_errors"][0].startswith("EnvError: AgentkitEnv.run(): EnvCrashed: ")


def test_verifiers_plays_a_failed_episode_again(played: Any) -> None:
    (episode,) = played["retried"]["episodes"]
    assert_same(episode, PaidLake(size=2))
    assert "EnvCrashed" in episode["episode_errors"][0]


def test_a_limit_of_verifiers_keeps_the_rewards_so_far(played: Any) -> None:
    (episode,) = played["limited"]["episodes"]
    assert episode["stop"] == "max_turns"
    assert_same(episode, PaidLake(size=2), turns=1)


def test_a_failing_model_gives_no_reward(played: Any) -> None:
    (episode,) = played["broken"]["episodes"]
    assert not episode["ok"]
    assert episode["rewards"] == {}
    assert "the model is broken" in episode["errors"][0]


def test_environments_go_back(played: Any) -> None:
    assert {name: group["held"] for name, group in played.items() if name != "command"} == dict.fromkeys(
        ("lake", "replayed", "failed", "retried", "sandboxed", "limited", "broken"), 0
    )


def test_the_documented_command_writes_rewards(played: Any) -> None:
    for episode in played["command"]:
        assert_same(episode, FrozenLake(split="test"), turns=10)
    assert sorted(episode["seed"] for episode in played["command"]) == [0, 0, 1, 1, 2, 2, 3, 3]
