"""``examples/asyppo_cluster.yaml``: Docker sandboxes with standbys, two engines, two DeepSpeed ranks, two critics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from requiring import require
from run_audit import read_lines

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.docker
@pytest.mark.timeout(1800)
def test_everything_together_trains(tmp_path: Path) -> None:
    require("ray", "pip install 'agentkit-rl[ray]'")
    require("deepspeed", "pip install 'agentkit-rl[deepspeed]'")
    subprocess.run([sys.executable, "-m", "agentkit", "sandbox", "build"], check=True, timeout=900)
    overrides = [f"dir={tmp_path / 'run'}", "steps=3", "critic.warmup_steps=1", "rollout.groups=4"]
    overrides += ["imitation.episodes=64", "evaluation.episodes=4"]
    result = subprocess.run(
        [sys.executable, "-m", "agentkit", "run", "examples/asyppo_cluster.yaml", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "time/step" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    last = steps[-1]
    assert last["sandbox/busy"] > 1
    assert last["sandbox/standbys"] > 0
    assert (last["staleness/max"], last["env/failures"]) == (1, 0)
    assert (last["engine/0/version"], last["engine/1/version"]) == (3, 3)
    assert last["critic/0/loss"] != last["critic/1/loss"]
    assert 0 < last["critic/advantage_masked"] < 1
    assert last["policy/loss"] != 0
