"""The agent loop in verl's own code: its dataset, agent-loop workers, transfer queue, replay buffer and advantages.

verl lives in a separate environment, which `.ci/adapters --install-only` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from fragile_lake import PaidLake
from requiring import require
from token_replay import assert_scores, played_again

from agentkit.envs.frozen_lake import FrozenLake

pytestmark = [pytest.mark.adapters, pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTKIT_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require(PYTHON.exists(), "run .ci/adapters --install-only, or set AGENTKIT_VERL_PYTHON")
    command = [PYTHON, ROOT / "tests" / "verl_player.py", tmp_path_factory.mktemp("verl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_rows_hold_what_the_server_generated_and_the_environment_rewarded(played: Any, trainer: str) -> None:
    for row in played[trainer]["rows"]:
        if row["loop"] == "rerendered":
            continue
        ids = row["prompts"] + row["responses"]
        mask = [0] * len(row["prompts"]) + row["response_mask"]
        assert_scores(ids, mask, [0.0] * len(row["prompts"]) + row["rollout_log_probs"])
        documented = row["loop"] == "frozen_lake"
        env = FrozenLake(split="train") if documented else PaidLake(size=2)
        reward, success = played_again(ids, mask, env, row["seed"], turns=10 if documented else 4)
        assert mask[-1]
        assert row["rm_scores"] == pytest.approx([0.0] * (len(row["responses"]) - 1) + [reward])
        assert sum(row["extra_fields"]["turn_scores"]) == pytest.approx(reward)
        found = row["success"] if trainer == "v0" else row["extra_fields"]["reward_extra_info"]["success"]
        assert found == success


def test_each_turn_is_a_row_if_the_history_is_rendered_again(played: Any) -> None:
    rows = [row for row in played["v1"]["rows"] if row["loop"] == "rerendered"]
    episodes = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["key"]):
        mask = [0] * len(row["prompts"]) + row["response_mask"]
        assert_scores(row["prompts"] + row["responses"], mask, [0.0] * len(row["prompts"]) + row["rollout_log_probs"])
        assert all(row["response_mask"])
        episodes[row["key"].split("_")[0]].append(row)
    assert len(episodes) == 2
    assert len(rows) > 2
    rewards = {session: sum(turns[0]["extra_fields"]["turn_scores"]) for session, turns in episodes.items()}
    for session, turns in episodes.items():
        assert [row["key"] for row in turns] == [f"{session}_{k}" for k in range(len(turns))]
        for row in turns:
            assert row["rm_scores"][-1] == pytest.approx(rewards[session])
            advantage = rewards[session] - sum(rewards.values()) / 2
            assert row["advantages"] == pytest.approx([advantage] * len(row["responses"]), abs=1e-6)


def test_a_voided_episode_is_no_row(played: Any) -> None:
    counts = Counter(row["seed"] for row in played["v1"]["rows"] if row["loop"] != "rerendered")
    assert counts == {0: 2, 3: 2, 7: 1}  # 3 is repaired by a retry, 7 has none, and 5 always fails
    assert {row["tag"]["status"] for row in played["v1"]["rows"]} == {"success"}
    assert "FragileLake-v0 failed (seed 5): " in played["v0"]["error"]
    assert "trainer.use_v1=true" in played["v0"]["error"]


def test_verl_computes_advantages_within_what_is_left_of_a_group(played: Any) -> None:
    for row in played["v1"]["rows"]:
        if row["loop"] == "rerendered":
            continue
        group = [sum(other["rm_scores"]) for other in played["v1"]["rows"] if other["seed"] == row["seed"]]
        mean = sum(group) / len(group) if len(group) > 1 else 0.0  # as verl defines a group of one
        expected = [flag * (sum(row["rm_scores"]) - mean) for flag in row["response_mask"]]
        assert row["advantages"] == pytest.approx(expected, abs=1e-6)


def test_the_versions_and_the_sampling_are_those_of_verl(played: Any) -> None:
    for row in played["v1"]["rows"]:
        assert (row["tag"]["min_global_steps"], row["tag"]["max_global_steps"]) == (4, 4)
    assert played["v0"]["timing"]["agent_loop/generate_sequences/min"] > 0
    for request in played["requests"]:
        sampling = request["sampling"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 1, -1)
        assert sampling["max_tokens"] in (24, 32)
        assert len(sampling["stop_token_ids"]) == 1
