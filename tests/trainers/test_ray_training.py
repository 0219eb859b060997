"""Runs whose engine and learner are actors train as runs in one process do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import gone
from safetensors.torch import load_file

import agentkit
from agentkit.errors import ConfigError, PluginError
from agentkit.records import iterate_trajectories
from agentkit.trainers.checkpoint import list_checkpoints

# A busy machine needs minutes to start Ray and the processes of its actors.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

TINY: dict[str, Any] = {
    "steps": 2,
    "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2, "actions_per_turn": 1},
    "engine": {"max_context": 256, "max_batch": 8, "threads": 1},
    "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6},
    "learner": {"lr": 1e-3, "threads": 1},
    "evaluation": {"episodes": 2},
}


def played(directory: Path) -> list[tuple[Any, ...]]:
    """Return every token of the episodes of a run, in a fixed order."""
    return sorted(
        (row.step, row.ending, played.seed, played.member, turn.action_ids.tolist(), turn.action_logprobs.tobytes())
        for row, played in iterate_trajectories(directory / "episodes.sqlite")
        for turn in played.turns
    )


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "inline"
    assert agentkit.train({**TINY, "deterministic": True, "dir": directory}).steps == 2
    return directory


@pytest.mark.parametrize("weights", ["auto", "gloo", "ipc"])
def test_one_engine_and_one_rank_equal_a_run_in_one_process_bit_for_bit(
    tmp_path: Path, inline: Path, weights: str
) -> None:
    actors = {
        "dir": tmp_path / "actors",
        "cluster": {"colocate": weights == "ipc"},
        "engine": {**TINY["engine"], "weights": weights},
    }
    assert agentkit.train({**TINY, "deterministic": True, **actors}).steps == 2
    assert played(tmp_path / "actors") == played(inline)
    one, other = final_weights(inline), final_weights(tmp_path / "actors")
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=0, msg=name)


def test_a_run_that_does_not_fit_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 2 gpu_like \(learner 2 × 1\), and the cluster has 0"):
        agentkit.train(
            {**TINY, "dir": tmp_path / "run", "cluster": {}, "learner": {"ranks": 2, "resources": {"gpu_like": 1.0}}}
        )


def test_the_command_trains_with_two_engines_and_two_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    overrides = ["steps=2", "rollout.groups=2", "rollout.group_size=2", "rollout.max_tokens=4", "evaluation.episodes=2"]
    overrides += ["imitation.episodes=8", "imitation.batch_episodes=4", "rollout.dynamic_sampling=false"]
    result = subprocess.run(
        [sys.executable, "-m", "agentkit", "run", "examples/cluster.yaml", f"dir={tmp_path / 'run'}", *overrides],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "STARTED_BY_TEST": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "step 2/2" in result.stdout
    for process in psutil.process_iter(["environ", "cmdline"]):  # Ray's processes inherit the environment
        if (process.info["environ"] or {}).get("STARTED_BY_TEST") == str(tmp_path):
            assert gone(process.pid, within=30.0), process.info["cmdline"]


def test_a_program_may_import_ray_first_and_have_a_token(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0" * 64)
    program = """
import ray
from agentkit.trainers.cluster import ray_cluster
with ray_cluster.local_cluster(1):
    print(len(ray.nodes()), "node")
"""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment = {**unset, "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "1 node" in result.stdout, result.stderr


def test_an_error_of_a_plugin_in_a_rank_ends_the_run_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_credit.py").write_text(
        "from agentkit.trainers.algorithms.advantages import grpo\n"
        "calls = 0\n"
        "def late(batch, values, config):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 2:\n"
        "        raise ZeroDivisionError('no second batch')\n"
        "    return grpo(batch, values, config)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    run = {**TINY, "steps": 3, "dir": tmp_path / "run", "checkpoint": {"every": 1}, "cluster": {}}
    run |= {"algorithm": {"advantage": "late_credit:late"}, "learner": {**TINY["learner"], "ranks": 2}}
    named = r"'late_credit:late' raised ZeroDivisionError: no second batch .*late_credit\.py"
    with pytest.raises(PluginError, match=named):
        agentkit.train(run)
    # A restart of the learner would only repeat the error.
    assert "learner_lost" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].step == 1
