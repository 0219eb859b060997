"""The vLLM engine: the conformance suite, and the life cycle of its processes.

An engine takes half a minute to start, so the tests share one where possible.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from engine_conformance import ENGINE, EngineConformance, Served, policy, prompt_of, save_policy, session
from processes import runs
from requiring import require

from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.vllm import VLLMEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

IN_PARTS = ENGINE.model_copy(update={"options": {"max_num_batched_tokens": 64}})
"""Prompts of more than 64 tokens, and several at once, are computed in parts."""
REMEDY = "run .ci/vllm, which makes an environment with vLLM and runs these tests in it"

OWNER = """
import asyncio, os, signal, sys
import psutil
from agentkit.config import EngineConfig, ModelConfig
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.vllm import VLLMEngine

async def main():
    interrupted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
    engine = VLLMEngine(ModelConfig(), EngineConfig(kind="vllm", max_batch=2, max_context=64, threads=1), seed=0)
    await engine.start()
    os.killpg(0, signal.SIGINT)  # what Ctrl-C in a terminal does
    await asyncio.wait_for(interrupted.wait(), 10)
    await asyncio.sleep(1)
    got = await asyncio.wait_for(engine.generate([5, 6, 7], Sampling(4), session="a"), 30)
    print("served", len(got.ids), *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def make(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Callable[[], Awaitable[Served]]]:
    require("vllm", REMEDY)
    directory = tmp_path_factory.mktemp("policy")
    model = save_policy(directory, seed=0)
    engines: list[VLLMEngine] = []

    async def start() -> Served:
        engines.append(VLLMEngine(model, IN_PARTS, seed=0))
        await engines[-1].start()
        return Served(engines[-1])

    yield start
    before = psutil.Process().children(recursive=True)
    for engine in engines:
        await engine.close()
    left = [process.name() for process in before if process.is_running() and "VLLM" in "".join(process.cmdline())]
    assert not left


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(make: Callable[[], Awaitable[Served]]) -> Served:
    return await make()


class TestVLLMEngine(EngineConformance):
    async def test_weights_are_updated_while_paused_only(self, served: Served) -> None:
        weights = served.stage(51, served.version + 1)
        with pytest.raises(EngineError, match="pause"):
            await served.engine.update_weights(weights)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_whose_update_failed_half_way_serves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs after the suite, because it breaks the shared engine."""
    version = served.version + 1
    state = list(policy(52).state_dict().items())
    weights = served.staging.stage(version, [state[:-3]])
    monkeypatch.setattr("agentkit.trainers.inference.vllm.check_fits", lambda *_: None)
    await served.engine.pause("abort")
    with pytest.raises(EngineError, match=f"version {version}"):
        await served.engine.update_weights(weights)
    for call in (served.engine.resume(), served.engine.generate(prompt_of(3), Sampling(2), session=session())):
        with pytest.raises(EngineError, match="half-way") as caught:
            await call
        assert caught.value.fatal


def test_seeds_of_tokens_are_uniform() -> None:
    """Neighbouring seeds at neighbouring positions: what each generator draws first is uniform over all of them."""
    require("vllm", REMEDY)
    from agentkit.trainers.inference.vllm_worker import mixed

    draws = [
        float(torch.rand(1, generator=torch.Generator().manual_seed(mixed(seed, position))))
        for seed in (0, 1, 2, 2**62)
        for position in range(500)
    ]
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    chi_square = ((counts - 100) ** 2 / 100).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; the draws are the same in every run


def test_processes_ignore_ctrl_c_and_end_with_their_owner(tmp_path: Path) -> None:
    require("vllm", REMEDY)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    log = tmp_path / "log"
    with log.open("w") as errors:
        owner = subprocess.run(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=300,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    assert owner.returncode == -signal.SIGKILL, log.read_text()
    words = next(line for line in owner.stdout.splitlines() if line.startswith("served")).split()
    assert words[1] == "4"
    pids = [int(word) for word in words[2:]]
    assert len(pids) >= 2
    deadline = time.monotonic() + 40
    while alive := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} outlived their owner"
        time.sleep(0.2)
