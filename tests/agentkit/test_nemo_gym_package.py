"""The adapter in NeMo Gym's own code: its servers of environment, agent and model, and its collection of rollouts.

NeMo Gym lives in a separate environment, which `.ci/adapters --install-only` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chat_stub import answer, text_of
from fragile_lake import PaidLake
from lake_replay import assert_replays
from requiring import require

pytestmark = [pytest.mark.adapters, pytest.mark.slow, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTKIT_NEMO_GYM_PYTHON", ROOT / ".venv-nemo-gym" / "bin" / "python"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require(PYTHON.exists(), "run .ci/adapters --install-only, or set AGENTKIT_NEMO_GYM_PYTHON")
    folder = tmp_path_factory.mktemp("nemo_gym")
    command = [PYTHON, ROOT / "tests" / "nemo_gym_player.py", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=420, check=False, env=environment, cwd=folder
    )
    logs = "".join(log.read_text()[-1000:] for log in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + logs
    return json.loads(done.stdout.splitlines()[-1])


def rollout(played: Any, agent: str, seed: int | None) -> dict[str, Any]:
    """Return the only rollout of this agent with this seed."""
    (found,) = [one for one in played["rollouts"] if (one["agent"], one["seed"]) == (agent, seed)]
    return found


def assert_same(found: dict[str, Any]) -> None:
    """Play the answers of a rollout again: texts, reward and metrics must be the same."""
    messages = [*found["responses_create_params"]["input"], *found["response"]["output"]]
    texts = [text_of(message) for message in messages]
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    env = PaidLake(size=2)
    assert env.instructions.strip() in texts[0]
    reward, metrics = assert_replays(texts[::2], texts[1::2], env, found["seed"], turns=4)
    assert found["reward"] == pytest.approx(reward)
    assert (found["terminated"], found["info"]) == (True, metrics)
    assert (found["mask_sample"], found["failure_kind"]) == (False, None)
    for k, said in enumerate(texts[1::2]):  # the model received the whole conversation
        assert said == answer([{"content": text} for text in texts[: 2 * k + 1]])


@pytest.mark.parametrize(("agent", "seed"), [("frozen_lake_agent", 0), ("frozen_lake_agent", 2), ("plain_agent", 4)])
def test_rewards_are_those_of_the_environment(played: Any, agent: str, seed: int) -> None:
    assert_same(rollout(played, agent, seed))


def test_some_answers_were_invalid(played: Any) -> None:
    assert rollout(played, "frozen_lake_agent", 0)["info"]["invalid_turns"] > 0


def test_a_failed_environment_masks_the_sample(played: Any) -> None:
    failed = rollout(played, "frozen_lake_agent", 5)
    assert failed["mask_sample"]
    assert failed["failure_kind"] == "agentkit:env_crashed"
    assert failed["failure_reason"].startswith("step raised OSError: its world is gone")
    assert failed["response"]["output"]


def test_the_agent_of_nemo_gym_has_no_reward_for_it(played: Any) -> None:
    failed = rollout(played, "plain_agent", 5)
    assert "reward" not in failed
    assert failed["_ng_failure_class"] == "agent_run_error"
    assert "its world is gone" in failed["_ng_failure_response_body"]


def test_a_row_without_a_seed_is_an_error(played: Any) -> None:
    failed = rollout(played, "frozen_lake_agent", None)
    assert "reward" not in failed
    assert "the seed None of a task must be an integer" in failed["_ng_failure_response_body"]


def test_an_agent_that_stops_early_gives_the_environment_back(played: Any) -> None:
    found = rollout(played, "plain_agent", 0)
    assert (found["terminated"], found["truncated"], found["info"]) == (False, True, {})
    assert found["reward"] == pytest.approx(1.0)  # that of one step on the ice
    assert played["held"] == 0
