"""The agent executor in OpenRLHF's own code: its engine actor, sample generator, advantages and loss.

OpenRLHF and vLLM live in a separate environment, which `.ci/adapters --install-only` creates.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fragile_lake import PaidLake
from requiring import require
from token_replay import assert_scores, played_again

from agentkit.envs.frozen_lake import FrozenLake

pytestmark = [pytest.mark.adapters, pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("AGENTKIT_OPENRLHF_PYTHON", ROOT / ".venv-openrlhf" / "bin" / "python"))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    require(PYTHON.exists(), "run .ci/adapters --install-only, or set AGENTKIT_OPENRLHF_PYTHON")
    command = [PYTHON, ROOT / "tests" / "openrlhf_player.py", tmp_path_factory.mktemp("openrlhf")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def groups(played: Any) -> dict[int, list[Any]]:
    found = defaultdict(list)
    for row in played["rows"]:
        found[row["seed"]].append(row)
    return found


def test_samples_hold_what_the_engine_generated_and_the_environment_rewarded(played: Any) -> None:
    ended = [row for row in played["rows"] if not row["info"]["voided"]]
    assert len(ended) == 8
    for row in ended:
        assert_scores(row["ids"], row["mask"], row["logprobs"])
        reward, success = played_again(row["ids"], row["mask"], PaidLake(size=2), row["seed"], turns=4)
        assert row["mask"][-1]
        assert row["reward"] == pytest.approx(reward)
        assert row["score"] == row["info"]["success"] == success
        assert not row["truncated"]
    assert len({row["reward"] for row in ended}) > 1


def test_a_voided_episode_has_no_action_and_the_mean_of_its_group(groups: Any) -> None:
    voided = {seed: [row for row in rows if row["info"]["voided"]] for seed, rows in groups.items()}
    assert {seed: len(rows) for seed, rows in voided.items()} == {0: 0, 2: 0, 3: 1, 5: 3}
    for row in (*voided[3], *voided[5]):
        assert not any(row["mask"])
        assert not row["truncated"]
    rest = [row for row in groups[3] if not row["info"]["voided"]]
    assert voided[3][0]["reward"] == pytest.approx(np.mean([row["reward"] for row in rest]))
    assert voided[3][0]["score"] == pytest.approx(np.mean([row["score"] for row in rest]))
    others = [row["reward"] for rows in groups.values() for row in rows if not row["info"]["voided"]]
    for row in voided[5]:  # all of its group failed: the mean of the engine's latest episodes
        assert min(others) <= row["reward"] <= max(others)


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_it_changes_neither_advantages_nor_gradients_of_others(played: Any, groups: Any, estimator: str) -> None:
    """Compute what OpenRLHF would compute without the voided episodes, but for the documented factors."""
    raw = {}
    for rows in groups.values():
        rest = [row for row in rows if not row["info"]["voided"]]
        rewards, n = np.array([row["reward"] for row in rest]), len(rest)
        lost, size = n < len(rows), len(rows)
        if not n:
            continue
        baseline = rewards.mean()
        if estimator == "reinforce":
            values = rewards
        elif estimator == "rloo":
            factor = size * (size - 2) / (size - 1) ** 2 if lost else 1.0
            values = factor * n / (n - 1) * (rewards - baseline)
        elif estimator == "group_norm":
            factor = np.sqrt((size - 1) / (size - 2)) if lost else 1.0
            values = factor * (rewards - baseline) / (rewards.std(ddof=1) + 1e-9)
        else:
            values = rewards - baseline
        raw |= {id(row): value for row, value in zip(rest, values, strict=True)}
    tokens = np.array([sum(row["mask"]) for row in played["rows"]])
    values = np.array([raw.get(id(row), 0.0) for row in played["rows"]])
    if estimator.startswith("reinforce"):
        mean = (values * tokens).sum() / tokens.sum()
        values = (values - mean) / np.sqrt(((values - mean) ** 2 * tokens).sum() / tokens.sum())
    result = played["losses"][estimator]
    for row, value, advantages in zip(played["rows"], values, result["advantages"], strict=True):
        mask = np.array(row["mask"][1:], float)
        np.testing.assert_allclose(np.array(advantages)[: len(mask)], value * mask, atol=1e-4)
    # The gradient of a micro-batch of 3: tokens have equal weights, or sequences that have tokens.
    for token_level in ("true", "false"):
        for start in range(0, len(values), 3):
            part = slice(start, start + 3)
            counts = tokens[part]
            denominators = np.full(3, counts.sum()) if token_level == "true" else counts * (counts > 0).sum()
            for row, value, count, denominator, gradient in zip(
                played["rows"][part], values[part], counts, denominators, result["gradients"][token_level][part],
                strict=True,
            ):  # fmt: skip
                mask = np.array(row["mask"][1:], float)
                expected = -value * mask / denominator if count else 0.0 * mask
                np.testing.assert_allclose(np.array(gradient)[: len(mask)], expected, atol=1e-5)


def test_the_documented_agent_plays(played: Any) -> None:
    assert len(played["documented"]) == 2
    for response in played["documented"]:
        ids = response["observation_tokens"]
        mask = [any(start <= k < end for start, end in response["action_ranges"]) for k in range(len(ids))]
        assert_scores(ids, mask, response["rollout_log_probs"])
        reward, success = played_again(ids, mask, FrozenLake(split="train"), 4, turns=10)
        assert response["reward"] == pytest.approx(reward)
        assert response["scores"] == success


def test_a_label_that_is_no_seed_is_an_error(played: Any) -> None:
    assert "the label 'none' is no seed: name the column with the seeds in --data.label_key" in played["error"]
