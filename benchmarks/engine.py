"""Tokens per second of the embedded engine, compared with transformers' ``generate`` on static batches.

    python benchmarks/engine.py [--repeats 3] [--json FILE]

Both serve the quickstart model on the CPU with the same number of threads. ``equal``: all answers have one length, the
best case of a static batch. ``long-tailed``: answer lengths are log-normal with the longest 20 times the median; a
static batch ends with its own longest answer and leaves slots empty until then; the engine refills them at once. Only
requested tokens count. The two sides alternate, and each ratio is the median over the repeats, so a busy machine
affects both sides equally; it hardly affects the ratio of processor seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentkit.config import EngineConfig, ModelConfig
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models import load_policy

CONCURRENCY = 64
PROMPT = 32
MEDIAN, LONGEST = 24, 480
TARGETS = {"equal": 0.7, "long-tailed": 3.5}


def workloads() -> dict[str, np.ndarray]:
    """Answer lengths in order of arrival."""
    tail = np.exp(np.random.default_rng(0).normal(np.log(MEDIAN), 1.0, 4 * CONCURRENCY))
    tail = tail.clip(1, LONGEST).round().astype(int)
    tail[tail.argmax()] = LONGEST
    return {"equal": np.full(CONCURRENCY, 96), "long-tailed": tail}


def prompts(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(3, 800, (count, PROMPT)).astype(np.int32)


class Clock:
    """Wall-clock and processor seconds of a block; the engine computes in a thread of this process."""

    def __enter__(self) -> Clock:
        self._begun = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]


def static_batches(model: Any, lengths: np.ndarray) -> Clock:
    """Measure ``generate`` on all requests, ``CONCURRENCY`` at a time in order of arrival."""
    asked = prompts(len(lengths))
    with Clock() as clock:
        for first in range(0, len(lengths), CONCURRENCY):
            ids = torch.from_numpy(asked[first : first + CONCURRENCY]).long()
            longest = int(lengths[first : first + CONCURRENCY].max())
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": longest, "eos_token_id": None}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert out.shape[1] == PROMPT + longest
    return clock


async def continuous(engine: HFEngine, lengths: np.ndarray, run: str) -> Clock:
    """Measure the engine on all requests, ``CONCURRENCY`` of them in flight at any time."""
    asked = prompts(len(lengths))
    line = iter(range(len(lengths)))

    async def client() -> None:
        for k in line:
            got = await engine.generate(asked[k], Sampling(int(lengths[k])), session=f"{run}-{k}")
            assert len(got.ids) == lengths[k]

    with Clock() as clock:
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return clock


async def measure(repeats: int) -> list[dict[str, Any]]:
    model = load_policy(ModelConfig(device="cpu"), seed=0)
    engine = HFEngine(ModelConfig(device="cpu"), EngineConfig(max_batch=CONCURRENCY, max_context=1024), seed=0)
    await engine.start()
    rows = []
    try:
        await continuous(engine, np.full(CONCURRENCY, 8), "warm")
        static_batches(model, np.full(CONCURRENCY, 8))
        for name, lengths in workloads().items():
            tokens = int(lengths.sum())
            pairs = []
            for repeat in range(repeats):
                static = static_batches(model, lengths)
                pairs.append((static, await continuous(engine, lengths, f"{name}-{repeat}")))
            rows.append(
                {
                    "workload": name,
                    "requests": len(lengths),
                    "tokens": tokens,
                    "longest_over_median": float(lengths.max() / np.median(lengths)),
                    "generate_tokens_per_s": tokens / statistics.median(a.wall for a, _ in pairs),
                    "engine_tokens_per_s": tokens / statistics.median(b.wall for _, b in pairs),
                    "ratio": statistics.median(a.wall / b.wall for a, b in pairs),
                    "cpu_ratio": statistics.median(a.cpu / b.cpu for a, b in pairs),
                    "target": TARGETS[name],
                }
            )
    finally:
        await engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/engine.json"))
    arguments = parser.parse_args()
    with torch.inference_mode():
        rows = asyncio.run(measure(arguments.repeats))
    print(f"{CONCURRENCY} concurrent requests, prompts of {PROMPT} tokens, {torch.get_num_threads()} CPU threads\n")
    columns = f"{'generate tok/s':>15} {'engine tok/s':>13} {'ratio':>6} {'CPU':>6} {'target':>7}"
    print(f"{'workload':<12} {'tokens':>7} {columns}")
    for row in rows:
        print(
            f"{row['workload']:<12} {row['tokens']:>7} {row['generate_tokens_per_s']:>15.0f} "
            f"{row['engine_tokens_per_s']:>13.0f} {row['ratio']:>6.2f} {row['cpu_ratio']:>6.2f} {row['target']:>7.1f}"
        )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")
    print(f"\nwritten to {arguments.json}")


if __name__ == "__main__":
    main()
