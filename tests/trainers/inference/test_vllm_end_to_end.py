"""vLLM where users meet it: a training run on its engine, and an evaluation against its OpenAI-compatible server."""

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

from agentkit.trainers.models.quickstart import build_quickstart

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

REMEDY = "run .ci/vllm, which makes an environment with vLLM and runs these tests in it"

CONFIG = """
env: {id: FrozenLake-v1, max_turns: 3}
steps: 2
engine: {kind: vllm, max_batch: 8, max_context: 1024, threads: 1}
rollout: {groups: 2, group_size: 4, max_tokens: 8, in_flight: continue, async_ratio: 1}
evaluation: {episodes: 4}
"""


def agentkit(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentkit", *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_run_trains_on_the_vllm_engine(tmp_path: Path) -> None:
    require("vllm", REMEDY)
    (tmp_path / "run.yaml").write_text(CONFIG)
    agentkit("run", "run.yaml", "dir=out", cwd=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line for line in lines if "policy/loss" in line or "policy/loss" in line.get("metrics", {})]
    assert len(losses) == 2
    # The first batch was sampled by the weights that train on it: two implementations of one model, one distribution.
    first = losses[0].get("metrics", losses[0])
    assert abs(first["policy/kl_behaviour"]) < 1e-4


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
