"""The adapter in SkyRL's own code: skyrl-gym's registry, SkyRL's dataset, generator, metrics and advantages.

SkyRL lives in a separate environment, which `.ci/adapters --install-only` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fragile_lake import PaidLake
from requiring import require
from token_replay import assert_scores, played_again

from agentkit.envs.frozen_lake import FrozenLake

pytestmark = [pytest.mark.adapters, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTKIT_SKYRL_PYTHON", ROOT / ".venv-skyrl" / "bin" / "python"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require(PYTHON.exists(), "run .ci/adapters --install-only, or set AGENTKIT_SKYRL_PYTHON")
    command = [PYTHON, ROOT / "tests" / "skyrl_player.py", tmp_path_factory.mktemp("skyrl")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_hold_what_the_engine_generated_and_the_environment_rewarded(played: Any) -> None:
    assert [(row["seed"], row["env"]) for row in played["rows"][::2]] == [
        (0, "frozen_lake"),
        (0, "lake"),
        (3, "lake"),
        (7, "replayed"),
    ]
    for row in played["rows"]:
        prompt, ids, mask = row["prompt_token_ids"], row["response_ids"], row["loss_masks"]
        before = [0] * len(prompt)
        assert_scores(prompt + ids, before + mask, before + row["logprobs"])
        env = FrozenLake(split="train") if row["env"] == "frozen_lake" else PaidLake(size=2)
        reward, success = played_again(prompt + ids, before + mask, env, row["seed"], turns=4)
        assert mask[-1]
        assert sum(row["rewards"]) == pytest.approx(reward)
        assert row["metrics"]["success"] == success
        ends = [k for k, flag in enumerate(mask) if flag and (k + 1 == len(mask) or not mask[k + 1])]
        assert row["metrics"]["turns"] == len(ends)
        assert {k for k, value in enumerate(row["rewards"]) if value} <= {*ends}
    assert any(row["metrics"]["invalid_turns"] for row in played["rows"])
    assert played["held"] == 0
    assert "environment/success" in played["metrics"]


def test_skyrl_computes_advantages_from_the_rewards(played: Any) -> None:
    for k in range(0, len(played["rows"]), 2):
        group = played["rows"][k : k + 2]
        mean = sum(sum(row["rewards"]) for row in group) / 2
        for row in group:
            expected = [flag * (sum(row["rewards"]) - mean) for flag in row["loss_masks"]]
            assert row["advantages"] == pytest.approx(expected, abs=1e-6)


def test_an_episode_whose_environment_fails_is_played_again(played: Any) -> None:
    """Seed 3 failed at its first step, once, and 7 too, where a replay continues it."""
    attempts = played["finished"][: len(played["rows"]) + 1]
    assert sorted(attempts).count("2_0") + attempts.count("2_1") == 3
    assert sorted({*attempts}) == [f"{row}_{sample}" for row in range(4) for sample in range(2)]


def test_a_failure_is_an_error_and_never_a_reward(played: Any) -> None:
    assert played["always"]["held"] == 0
    assert "EnvCrashed: step raised OSError: its world is gone" in played["always"]["error"]
    assert "EnvCrashed: step raised OSError: its world is gone for a moment" in played["plain"]["error"]
    assert played["no_seed"].startswith("ConfigError: a row of the dataset has no seed")
    assert played["bad_seed"].startswith("ConfigError: the seed 'x' of a task must be an integer")


def test_environments_go_back(played: Any) -> None:
    """Also if SkyRL drops an episode without closing it, because its engine failed."""
    assert played["engine"] == {"error": "ConnectionError: the server is gone", "held": 0}
    assert played["plain"]["held"] == 0
    assert (played["playing"], played["closed"]) == (1, 0)


def test_the_end_of_turn_is_no_part_of_an_answer(played: Any) -> None:
    assert [metrics["invalid_turns"] for metrics in played["plain_answers"]] == [0, 0, 1]
