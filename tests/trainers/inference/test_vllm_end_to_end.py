"""End-to-end tests of vLLM: a training run on its engine, and an evaluation on its OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from requiring import require

from agentkit.records import iterate_trajectories
from agentkit.trainers.models.quickstart import build_quickstart

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

REMEDY = "run .ci/vllm, which makes an environment with vLLM and runs these tests in it"

CONFIG = """
env: {id: FrozenLake-v1, max_turns: 3}
steps: 4
engine: {kind: vllm, max_batch: 8, max_context: 1024, threads: 1, options: {max_num_batched_tokens: 128}}
rollout: {groups: 2, group_size: 4, max_tokens: 8, async_ratio: 1}
evaluation: {episodes: 4, every: 2}
"""
"""With so small a budget, prompts are computed in parts."""


def agentkit(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentkit", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("in_flight", ["retry", "continue"])
def test_a_run_trains_on_the_vllm_engine(tmp_path: Path, in_flight: str) -> None:
    require("vllm", REMEDY)
    (tmp_path / "run.yaml").write_text(CONFIG)
    agentkit("run", "run.yaml", "dir=out", f"rollout.in_flight={in_flight}", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "policy/loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/success" in line] == [0, 2, 4]
    # The first batch was sampled by the weights that train on it: two implementations of one model, one distribution.
    assert abs(trained[0]["policy/kl_behaviour"]) < 1e-4
    assert max(line["staleness/max"] for line in trained) == 1
    records = tmp_path / "out" / "episodes.sqlite"
    evaluated = [row.step for row, _ in iterate_trajectories(records, ending="eval")]
    assert evaluated == [0] * 4 + [2] * 4 + [4] * 4
    # Each version served episodes that were trained on, and only steps that were finished have one.
    played = [trajectory for _, trajectory in iterate_trajectories(records, ending="trained")]
    versions = {version for trajectory in played for turn in trajectory.turns for version, _ in turn.versions}
    assert {0, 1, 2} <= versions <= {0, 1, 2, 3}


def test_a_deterministic_run_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "agentkit", "run", "run.yaml", "deterministic=true", "rollout.async_ratio=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "deterministic=true needs engine.kind=hf" in done.stderr


@contextlib.contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    options = ["--model", str(model), "--served-model-name", "quick", "--dtype", "float32", "--enforce-eager"]
    limits = ["--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *options, *limits], stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **quiet}
        )
        try:
            deadline = time.monotonic() + 200
            while True:
                assert server.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                        break
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(10)


def test_an_evaluation_asks_vllms_own_server(tmp_path: Path) -> None:
    require("vllm", REMEDY)
    build_quickstart(tmp_path / "model")
    with vllm_server(tmp_path / "model", tmp_path / "log") as url:
        settings = ["rollout.max_tokens=8", "env.max_turns=3", "evaluation.temperature=1.0"]
        out = agentkit(
            "eval", "quick", *settings, "--env", "FrozenLake-v1", "--endpoint", url, "--episodes", "6", cwd=tmp_path
        )
    assert "success" in out
    assert "episodes  6" in out
